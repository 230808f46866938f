"""Names of Services and their pods for the test cluster, which has no CoreDNS: a stand-in.

It answers A queries below `svc.cluster.local` from the API server's EndpointSlices, asked anew
for every query, as a real cluster's DNS would once it has caught up. Everything else is unknown.
"""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Callable
from typing import Any

from dnslib import QTYPE, RCODE, RR, A, DNSRecord  # type: ignore[import-untyped]

DOMAIN = ("svc", "cluster", "local")
Get = Callable[[str], dict[str, Any]]


class StandInDns:
    """On `address`:53, UDP. `get` reads a path of the API server."""

    def __init__(self, address: str, get: Get) -> None:
        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                data, sock = self.request
                sock.sendto(_answer(data, get), self.client_address)

        self._server = socketserver.ThreadingUDPServer((address, 53), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _answer(data: bytes, get: Get) -> bytes:
    asked = DNSRecord.parse(data)
    reply = asked.reply()
    found = _addresses(str(asked.q.qname).rstrip(".").lower().split("."), get)
    if found is None:
        reply.header.rcode = RCODE.NXDOMAIN
    elif asked.q.qtype == QTYPE.A:
        for address in found:
            reply.add_answer(RR(asked.q.qname, QTYPE.A, rdata=A(address), ttl=1))
    packed: bytes = reply.pack()
    return packed


def _addresses(labels: list[str], get: Get) -> list[str] | None:
    *names, _, _, _ = labels if len(labels) > 3 else ["", "", "", ""]
    if tuple(labels[-3:]) != DOMAIN or len(names) not in (2, 3):
        return None
    *host, service, namespace = names
    try:
        spec = get(f"/api/v1/namespaces/{namespace}/services/{service}")["spec"]
    except OSError:
        return None
    if spec["clusterIP"] != "None":
        return None if host else [spec["clusterIP"]]
    slices = get(
        f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        f"?labelSelector=kubernetes.io/service-name={service}"
    )["items"]
    return [
        address
        for part in slices
        for endpoint in part.get("endpoints") or ()
        if endpoint["conditions"].get("ready") and host in ([], [endpoint.get("hostname")])
        for address in endpoint["addresses"]
    ] or None
