#!/bin/sh
# The mesh gate for images without Python: mesh_wait.sh [seconds]. Always exits 0: it fails open.
# Needs curl, wget or nc. Prints the same lines as atoll.mesh_wait().

say() { printf 'mesh-wait: %s\n' "$*" >&2; }

# Percent-encoded byte by byte; od is in POSIX, jq and python are not.
escape() {
    for byte in $(printf '%s' "$1" | od -An -v -tx1); do
        case $byte in
        3[0-9] | 4[1-9a-f] | 5[0-9a] | 6[1-9a-f] | 7[0-9a] | 2d | 2e | 5f | 7e)
            printf '%b' "\\0$(printf '%o' "0x$byte")" ;;
        *) printf '%%%s' "$(printf '%s' "$byte" | tr a-f A-F)" ;;
        esac
    done
}

# Sets name and port; fails on what is neither host, host:port, [v6]:port nor a bare v6 address.
split() {
    rest=${1#http://}
    rest=${rest%/}
    port=
    case $rest in
    \[*\]) name=${rest#\[} name=${name%\]} ;;
    \[*\]:*) name=${rest#\[} port=${name##*\]:} name=${name%%\]*} ;;
    *:*:*) name=$rest ;;
    *:*) name=${rest%%:*} port=${rest#*:} ;;
    *) name=$rest ;;
    esac
    : "${port:=2379}"
    case $name in '' | *[]/@?#\ []*) return 1 ;; esac
    case $port in *[!0-9]* | ??????*) return 1 ;; esac
    [ "$port" -gt 0 ] && [ "$port" -lt 65536 ]
}

# The HTTP status of one GET, or nothing; never through a proxy. busybox's wget may know no -T, and
# nc's and wget's limits are for each read, so `timeout` (which may be missing) bounds the whole.
fetch() {
    case $tool in
    curl) curl -g -s -o /dev/null -w '%{http_code}' --noproxy '*' --max-time 2 "http://$at$1" ;;
    gnuwget) $bound wget -q -S --no-proxy -O /dev/null -T 2 -t 1 --max-redirect=0 "http://$at$1" ;;
    wget) $bound wget -S -Y off -O /dev/null "http://$at$1" ;;
    nc)
        printf 'GET %s HTTP/1.0\r\nHost: %s\r\n\r\n' "$1" "$at" |
            $bound nc -w 2 "$name" "$port" | sed 1q ;;
    esac 2>&1 | sed -n 's/^ *HTTP[^ ]* \([0-9]*\) .*/\1/; /^[0-9][0-9][0-9]$/p'
}

host=${NODE_NAME:-${KUBERNETES_NODE_NAME:-}}
endpoint=${ATOLL_MESH_ENDPOINT-${BASILICA_RDZV_ENDPOINT:-}}
limit=${1:-60}
limit=${limit%%.*}
case $limit in
-[0-9]*) limit=0 ;;
'' | *[!0-9]*) limit=60 ;;
esac
# A leading zero would make it octal, and a shell that cannot read a number ends.
limit=${limit#"${limit%%[!0]*}"}
case $limit in '') limit=0 ;; ??????????*) limit=999999999 ;; esac
if [ -z "$host" ] || [ -z "$endpoint" ]; then exit 0; fi
say "BEGIN host='$host' endpoint='$endpoint' timeout=${limit}s"
if ! split "$endpoint" 2>/dev/null; then
    say "TIMEOUT after=0s bad endpoint '$endpoint', expected host:port"
    exit 0
fi
case $name in *:*) at="[$name]:$port" ;; *) at="$name:$port" ;; esac
for tool in curl wget nc ''; do
    if [ -n "$tool" ] && command -v "$tool" >/dev/null 2>&1; then break; fi
done
if [ -z "$tool" ]; then
    say "TIMEOUT after=0s neither curl, wget nor nc is in this image"
    exit 0
fi
bound=
if command -v timeout >/dev/null 2>&1; then bound='timeout 2'; fi
if [ "$tool" = wget ] && wget --version 2>/dev/null | grep -q GNU; then tool=gnuwget; fi

key=$(escape "$host")
started=$(date +%s)
elapsed() { echo $(($(date +%s) - started)); }
pauses="0.05 0.1 0.2 0.4 0.8 1.5 2" # the last one stays
while :; do
    for outcome in ready degraded; do
        code=$(fetch "/v2/keys/basilica/mesh-$outcome/$key")
        if [ "$code" = 200 ]; then
            case $outcome in ready) word=OK ;; *) word=DEGRADED ;; esac
            say "$word after=$(elapsed)s host='$host'"
            exit 0
        fi
        # Nobody answers, or no time is left: the second key can tell no more.
        if [ "$code" = 000 ] || [ "$(elapsed)" -ge "$limit" ]; then break; fi
    done
    left=$((limit - $(elapsed)))
    if [ "$left" -le 0 ]; then
        say "TIMEOUT after=$(elapsed)s host='$host'"
        exit 0
    fi
    pause=${pauses%% *}
    pauses=${pauses#* }
    if [ "$left" -eq 1 ] && [ "$pause" = 2 ]; then pause=1; fi
    sleep "$pause" 2>/dev/null || sleep 1 # a sleep that knows no fractions
done
