"""Authentication: a bearer token, stored as a hash and valid for one namespace, or the session of a
browser that signed in with one."""

from __future__ import annotations

import hashlib
import ipaddress
import secrets
from collections.abc import Callable

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from atoll.core.errors import Denied
from atoll.server.http.operations import Plane

CSRF = "x-atoll-csrf"


def new_token() -> str:
    """Makes a random token of 256 bits. It is printed once and never stored."""
    return f"atoll_{secrets.token_urlsafe(32)}"


def hash_token(token: str) -> str:
    # Tokens are long and random, so a fast hash is as safe as a slow one.
    return hashlib.sha256(token.encode()).hexdigest()


async def authenticate(plane: Plane, request: Request) -> str:
    """Returns the namespace of the token or session. Raises Denied if it is not valid, and
    Temporary if the namespace has too many connections."""
    hash_of_token = _session_token(plane, request)
    if hash_of_token is None:
        hash_of_token = hash_token(_bearer(plane, request))
    namespace = await plane.tokens.namespace_of(hash_of_token)
    if namespace is None:
        how = plane.setup.new_token
        raise Denied(f"this token is unknown here: create one with '{how}'")
    connection = request.scope.get("state", {}).get("connection")
    if connection is not None:  # absent where another server runs the application
        connection.authenticate(namespace)
    return namespace


def token_of(request: Request) -> str:
    """The bearer token of a request; empty if it has none."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def cookie_of(plane: Plane, request: Request) -> str | None:
    return request.cookies.get(plane.sessions.cookie)


def _bearer(plane: Plane, request: Request) -> str:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if not token.strip():
        how = plane.setup.new_token
        raise Denied(f"no token: send 'Authorization: Bearer <token>', made with '{how}'")
    if scheme.lower() != "bearer":
        raise Denied(f"expected a Bearer token, got {scheme[:20]!r}")
    return token.strip()


def _session_token(plane: Plane, request: Request) -> str | None:
    """The hash of the token behind a browser's session; None if this is no browser.

    A browser sends its cookie with requests of any site; only our own pages also have the CSRF
    token of the session. Reads need it too: another server on this machine is the same site. The
    cookie alone reads nothing, not even the CSRF token.
    """
    if "authorization" in request.headers:
        return None
    cookie = cookie_of(plane, request)
    if cookie is None:
        return None
    session = plane.sessions.find(cookie)
    if session is None:
        raise Denied("the session has ended: run 'atoll ui' to sign in again")
    if not secrets.compare_digest(session.csrf.encode(), request.headers.get(CSRF, "").encode()):
        raise HTTPException(403, "this request came from no page of atoll")
    check_dashboard_host(plane, request)
    check_origin(request)
    return session.token


def check_origin(request: Request) -> None:
    """Raises a 403 if a page of another origin made this request."""
    origin = request.headers.get("origin")
    own = f"{request.url.scheme}://{request.headers.get('host', '')}"
    site = request.headers.get("sec-fetch-site", "same-origin")
    if (origin is not None and origin != own) or site not in ("same-origin", "none"):
        raise HTTPException(403, "this request came from another origin")


def check_host(plane: Plane, request: Request) -> None:
    """Raises a 403 for a request without a token to a host name that is not this machine's, if the
    server listens on this machine only.

    A foreign page could resolve its own name to this machine (DNS rebinding) and read what needs
    no token.
    """
    name = _host_name(request)
    if (
        plane.sessions.is_loopback
        and not _is_loopback(name)
        and name != plane.sessions.host
        and "authorization" not in request.headers
    ):
        raise HTTPException(403, "this control plane serves this machine only, by 127.0.0.1")


def check_dashboard_host(plane: Plane, request: Request) -> None:
    """Raises a 403 unless the request uses the host name of the dashboard.

    Browsers send cookies of 127.0.0.1 and localhost to every port, and so to servers of other
    users of this machine.
    """
    check_host(plane, request)
    name = _host_name(request)
    if name != plane.sessions.host and _is_loopback(name):
        raise HTTPException(
            403, "the dashboard has a name of its own on this machine: run 'atoll ui' to open it"
        )


def _host_name(request: Request) -> str:
    name = request.headers.get("host", "").lower()
    return name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]


def _is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")


class Gate:
    """Runs before routing: ignores doubled and trailing slashes, and refuses foreign host names."""

    def __init__(
        self, app: ASGIApp, plane: Plane, on_refusal: Callable[[Request, Exception], Response]
    ) -> None:
        self._app = app
        self._plane = plane
        self._on_refusal = on_refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http":
            # basilica clients append their paths to a base URL that may end in a slash.
            scope["path"] = "/" + "/".join(filter(None, scope["path"].split("/")))
            request = Request(scope)
            try:
                check_host(self._plane, request)
            except HTTPException as error:
                app = self._on_refusal(request, error)
        await app(scope, receive, send)
