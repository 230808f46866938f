"""The files of the dashboard. One page serves every address. The paths of its files contain a
digest of their content, so that browsers may cache them for ever."""

from __future__ import annotations

import gzip
import hashlib
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
SHELL = "index.html"
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'self'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Bundle(NamedTuple):
    """All files, and the digest in their paths."""

    digest: str
    plain: dict[str, bytes]
    packed: dict[str, bytes]


@cache
def bundle() -> Bundle:
    plain = {
        each.name: each.read_bytes()
        for each in files(__package__).joinpath("static").iterdir()
        if "." + each.name.rpartition(".")[2] in TYPES
    }
    digest = hashlib.sha256(b"".join(plain[name] for name in sorted(plain))).hexdigest()[:12]
    plain[SHELL] = plain[SHELL].replace(b"{{assets}}", f"/assets/{digest}".encode())
    packed = {name: gzip.compress(content, 9, mtime=0) for name, content in plain.items()}
    return Bundle(digest, plain, packed)


async def shell(request: Request) -> Response:
    return _file(request, SHELL, {"Cache-Control": "no-cache"})


async def asset(request: Request) -> Response:
    _, _, digest, *names = request.url.path.split("/")
    if digest != bundle().digest or len(names) != 1 or names[0] not in bundle().plain:
        raise HTTPException(404)
    return _file(request, names[0], {"Cache-Control": "public, max-age=31536000, immutable"})


def _file(request: Request, name: str, headers: dict[str, str]) -> Response:
    is_packed = "gzip" in request.headers.get("accept-encoding", "")
    content = (bundle().packed if is_packed else bundle().plain)[name]
    encoding = {"Content-Encoding": "gzip"} if is_packed else {}
    kind = TYPES["." + name.rpartition(".")[2]]
    return Response(
        content,
        media_type=kind,
        headers={**HEADERS, **headers, **encoding, "Vary": "Accept-Encoding"},
    )
