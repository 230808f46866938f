"""The routes of the dashboard: its pages and the data they read."""

from __future__ import annotations

import gzip
import hashlib
from functools import cache
from importlib.resources import files
from typing import Annotated, NamedTuple

from msgspec import Meta
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from atoll.core.errors import Denied
from atoll.core.model import Model
from atoll.server.http.auth import (
    authenticate,
    check_dashboard_host,
    check_origin,
    cookie_of,
    hash_token,
    token_of,
)
from atoll.server.http.operations import (
    Answer,
    ApiCall,
    Operation,
    PathEndpoint,
    Plane,
    RequestHandler,
    json_answer,
    on_error,
    routes,
)
from atoll.server.ui import compare, views
from atoll.server.ui.sessions import MAX_S

# The files of the dashboard. One page serves every address. The paths of its files contain a
# digest of their content, so that browsers may cache them for ever.

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


# Sign-in and sign-out of the dashboard.

SECRET = Annotated[str, Meta(max_length=200)]


class SignIn(Model, frozen=True):
    """A code of `atoll ui`, or a token."""

    code: SECRET | None = None
    token: SECRET | None = None


class SignedIn(Model, frozen=True, omit_defaults=False):
    """`csrf` is sent here and nowhere else. Pages store it where only pages of the same host and
    port find it, so another server that is sent the cookie does not have it."""

    csrf: str
    namespace: str


class SignInCode(Model, frozen=True, omit_defaults=False):
    """Signs a browser in once, within a minute: open `/in#CODE`."""

    code: str
    host: str  # the host name of the dashboard on this machine, instead of 127.0.0.1


class SessionsEnded(Model, frozen=True, omit_defaults=False):
    sessions: int


async def new_code(call: ApiCall) -> Answer:
    sessions = call.plane.sessions
    token = token_of(call.request)
    if not token:
        raise Denied("expected a token: a browser session cannot make codes")
    return json_answer(
        SignInCode(code=sessions.new_code(call.namespace, hash_token(token)), host=sessions.host)
    )


async def revoke(call: ApiCall) -> Answer:
    return json_answer(SessionsEnded(sessions=call.plane.sessions.end_all(call.namespace)))


async def sign_in(call: ApiCall) -> Answer:
    """Signs a browser in. A POST, so that opening or previewing a link does not use its code up;
    and from our own pages only: another site could sign the browser in as somebody else and so see
    what its user does."""
    check_dashboard_host(call.plane, call.request)
    check_origin(call.request)
    plane, body = call.plane, call.body
    cookie = None
    if body.code is not None:
        cookie = plane.sessions.redeem(body.code)
    elif body.token is not None:
        namespace = await plane.tokens.namespace_of(hash_token(body.token.strip()))
        if namespace is None:
            raise Denied(f"this token is unknown here: create one with '{plane.setup.new_token}'")
        cookie = plane.sessions.begin(namespace, hash_token(body.token.strip()))
    if cookie is None:
        raise Denied("expected a code or a token")
    session = plane.sessions.find(cookie)
    assert session is not None
    answer = json_answer(SignedIn(csrf=session.csrf, namespace=session.namespace))
    answer.set_cookie(
        plane.sessions.cookie,
        cookie,
        max_age=int(MAX_S),
        path="/",
        secure=call.request.url.scheme == "https",
        httponly=True,
        samesite="strict",
    )
    return answer


async def sign_out(call: ApiCall) -> Answer:
    cookie = cookie_of(call.plane, call.request)
    if cookie is not None:
        call.plane.sessions.end(cookie)
    answer = Response(status_code=204)
    answer.delete_cookie(call.plane.sessions.cookie, path="/", httponly=True, samesite="strict")
    return answer


MAX_BODY = 10_000  # a code or a token, with room to spare

OPERATIONS = (
    Operation("POST", "/ui/codes", new_code, "Make a code that signs a browser in.", {}),
    Operation("DELETE", "/ui/sessions", revoke, "End all sessions of the namespace.", {}),
    Operation(
        "POST",
        "/ui/session",
        sign_in,
        "Sign in with a code or a token.",
        {},
        body=SignIn,
        max_body=MAX_BODY,
        is_open=True,
    ),
    Operation("DELETE", "/ui/session", sign_out, "Sign out.", {}),
    Operation("GET", "/ui/rows", views.rows, "Trainings as rows.", {}, query=views.RowsQuery),
    Operation("GET", "/ui/page/{name}", views.page, "One training.", {}, query=views.PageQuery),
    Operation("GET", "/ui/ranks/{name}", views.ranks, "Some ranks.", {}, query=views.RanksQuery),
    Operation(
        "GET",
        "/ui/metrics/{name}",
        views.metric_bands,
        "Its metrics over time.",
        {},
        query=views.MetricBandsQuery,
    ),
    Operation(
        "GET",
        "/ui/compare",
        compare.compare,
        "Trainings beside each other.",
        {},
        query=compare.CompareQuery,
    ),
    Operation("GET", "/ui/rounds/{name}", views.rounds, "Its rounds.", {}, query=views.GridQuery),
    Operation(
        "GET", "/ui/stream", views.stream, "Which trainings change.", {}, query=views.StreamQuery
    ),
)
PAGES = ("/", "/in", "/compare", "/t/{path:path}")


def routes_of(plane: Plane) -> list[Route]:
    return [
        *routes(OPERATIONS, plane, authenticate, on_error),
        *(Route(path, _page(plane, shell)) for path in PAGES),
        Route("/assets/{path:path}", _page(plane, asset)),
    ]


def _page(plane: Plane, handler: RequestHandler) -> PathEndpoint:
    async def get(request: Request) -> Response:
        check_dashboard_host(plane, request)
        return await handler(request)

    return PathEndpoint({"GET": get}, _as_text)


def _as_text(request: Request, error: Exception) -> Response:
    """Errors of pages as plain text: people read them, not programs."""
    if isinstance(error, HTTPException):
        return PlainTextResponse(f"atoll: {error.detail}\n", error.status_code, HEADERS)
    return on_error(request, error)
