"""The shell command that a basilica client ships, as the script a rank runs. Pure.

The client writes one line for `/bin/sh -c`, meant for the pods of its own platform. Here ranks may
share a machine, start together, and have no etcd; this module rewrites what would break then.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

AUTO = (
    'exec torchrun --rdzv-backend={backend} --rdzv-endpoint="$BASILICA_RDZV_ENDPOINT" '
    '--rdzv-id="$BASILICA_RDZV_ID" --nnodes="$BASILICA_WORLD_MIN":"$BASILICA_WORLD_MAX" '
    '--nproc-per-node="$BASILICA_GPUS_PER_POD" "$@"'
)
ALONE = 'exec torchrun --standalone --nproc-per-node="$BASILICA_GPUS_PER_POD" "$@"'
SHIPPED = "/tmp/__basilica_source.py"
# Ranks of one machine would write the same file, and run each other's code.
OWN_FILE = (
    "ATOLL_SHIPPED=$(mktemp -d ./shipped.XXXXXX 2>/dev/null || mktemp -d) || exit 1\n"
    "ATOLL_SHIPPED=$ATOLL_SHIPPED/source.py"
)
# The client adds this after the script's name, where torchrun takes it for an argument of the
# script. Its last call would also make every start wait a quarter of an hour for ranks between
# target and max, which nobody has asked for.
INJECTED = " --rdzv-conf=timeout=1500,last_call_timeout=900"
CONF = "--rdzv-conf=timeout=1500,join_timeout=1500,last_call_timeout=5"

# Commands may be megabytes long: every pattern here reads them once.
_TORCHRUN = re.compile(r"(?<![\w.=-])torchrun(?=\s+[^\s;&|<>)#])")
_HAS_CONF = re.compile(r"--rdzv[-_]conf[= ]")
_ETCD = re.compile(r"(--rdzv[-_]backend[= ])etcd(-v2)?(?=\s|$)")
_ELASTIC_NODES = '--nnodes="$BASILICA_WORLD_MIN":"$BASILICA_WORLD_MAX"'
_FIXED_NODES = '--nnodes="$BASILICA_WORLD_TARGET" --node-rank="$BASILICA_RANK"'
# What the client says of the meeting point, which ranks that do not meet have none of.
_RENDEZVOUS_FLAGS = re.compile(
    r"""--rdzv[-_](?:backend[= ]\S+|endpoint[= ]"?\$\{?BASILICA_RDZV_ENDPOINT\}?"?"""
    r"""|id[= ]"?\$\{?BASILICA_RDZV_ID\}?"?|conf[= ]\S+) ?"""
)
_POSITIONAL = re.compile(r"\$\{?[@*#1-9]")
_FIRST = re.compile(r"[\w./@%+:-]+(?=\s|$)")
_QUOTED = re.compile(r"""'[^']*'|"(?:[^"\\]|\\.)*"|\\.""", re.DOTALL)
_OPERATOR = re.compile(r"[;&|<>()`#'\"\n]|\$\(")
_SUBSTITUTED = re.compile(r"\$\(+[^()]*\)+|`[^`]*`|[<>]&")
_NEXT = re.compile(r"&&|\|\||[;&()\n]")
_LEADING = re.compile(r"(?:(?:exec|then|do|else|!|\{|\w+=\S*)\s+)*")
_BUILTINS = frozenset(
    "alias bg break case cd command continue eval exec exit export false fg for function if jobs "
    "local read readonly return set shift source test times trap true type ulimit umask unset "
    "until wait while . : [ { } do done elif else esac fi then".split()
)


def shell_script(
    command: str, *, args: Sequence[str], backend: str, path_first: str | None = None
) -> str:
    """The script that `/bin/sh` reads from a file, so that a command may have any length.

    `backend` is the rendezvous backend in use; `path_first` is a directory searched before PATH.
    """
    auto = ALONE if backend == "none" else AUTO.format(backend=backend)
    text = auto if command.strip() == "auto" else command
    text = with_rendezvous(text, backend)
    if args and takes_args(text):
        text = f'{text.rstrip()} "$@"'
    if is_simple(text):
        text = f"exec {text}"  # the rank is then the program itself, and its signals are its own
    lines = [text.replace(SHIPPED, '"$ATOLL_SHIPPED"')]
    if SHIPPED in text:
        lines.insert(0, OWN_FILE)
    if path_first is not None:
        lines.insert(0, f"PATH={shlex.quote(path_first)}:$PATH; export PATH")
    return "\n".join(lines) + "\n"


def with_rendezvous(text: str, backend: str) -> str:
    """The command with torchrun's own flags before the script's name, for `backend`."""
    if not _TORCHRUN.search(text):
        # The client adds it wherever it reads that word, `--launcher=torchrun` too.
        return text.removesuffix(INJECTED) if "torchrun" in text else text
    text = text.replace(INJECTED, "")
    if backend == "none":
        is_clients = "BASILICA_RDZV_ENDPOINT" in text
        text = _RENDEZVOUS_FLAGS.sub("", text) if is_clients else text
        return text.replace(_ELASTIC_NODES, "--standalone")
    if not _HAS_CONF.search(text):
        text = _TORCHRUN.sub(f"torchrun {CONF}", text)
    if backend == "static":
        return text.replace(_ELASTIC_NODES, _FIXED_NODES)
    return _ETCD.sub(lambda match: match[1] + backend, text)


def takes_args(text: str) -> bool:
    """Whether arguments appended to the command reach its last program.

    After `done`, a comment or the last line of a here-document they would break the script.
    """
    expanded = _QUOTED.sub(lambda match: "_" if match[0][0] == "'" else match[0], text)
    if _POSITIONAL.search(expanded):
        return False
    bare = _SUBSTITUTED.sub("_", _QUOTED.sub("_", text.rstrip()))
    if "<<" in bare or re.search(r"(?<!\S)#", bare):
        return False
    last = _NEXT.split(bare)[-1].strip()
    first = last[_LEADING.match(last).end() :].partition(" ")[0]  # type: ignore[union-attr]
    return bool(first) and first not in _BUILTINS and "|" not in last


def is_simple(text: str) -> bool:
    """Whether this is one program with its arguments. In doubt, it is not."""
    first = _FIRST.match(text)
    if first is None or first[0] in _BUILTINS:
        return False
    return not _OPERATOR.search(_QUOTED.sub("_", text))
