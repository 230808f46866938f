"""Signing in to the dashboard and out of it."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta
from starlette.responses import Response

from atoll.core.errors import Denied
from atoll.core.model import Model
from atoll.server.http.auth import check_dashboard_host, check_origin, cookie_of, hashed, token_of
from atoll.server.http.operations import Answer, ApiCall, json_answer
from atoll.server.ui.sessions import LONGEST_S

SECRET = Annotated[str, Meta(max_length=200)]


class SignIn(Model, frozen=True):
    """A code of `atoll ui`, or a token."""

    code: SECRET | None = None
    token: SECRET | None = None


class SignedIn(Model, frozen=True, omit_defaults=False):
    """`csrf` is told here and nowhere else. Pages keep it where only pages of the same host and
    port find it, so a server to which the browser sends the cookie does not have it."""

    csrf: str
    namespace: str


class SignInCode(Model, frozen=True, omit_defaults=False):
    """Signs a browser in once, within a minute: open `/in#CODE`."""

    code: str
    host: str  # the dashboard's own name on this machine, which takes the place of 127.0.0.1


class SessionsEnded(Model, frozen=True, omit_defaults=False):
    sessions: int


async def new_code(call: ApiCall) -> Answer:
    sessions = call.plane.sessions
    token = token_of(call.request)
    if not token:
        raise Denied("a code is made with a token, not by a browser")
    return json_answer(
        SignInCode(code=sessions.new_code(call.namespace, hashed(token)), host=sessions.host)
    )


async def revoke(call: ApiCall) -> Answer:
    return json_answer(SessionsEnded(sessions=call.plane.sessions.end_all(call.namespace)))


async def sign_in(call: ApiCall) -> Answer:
    """Not by a GET: opening or previewing a link uses nothing up. Nor by a page of others, which
    would sign a browser in as somebody else and so see what its user does."""
    check_dashboard_host(call.plane, call.request)
    check_origin(call.request)
    plane, body = call.plane, call.body
    cookie = None
    if body.code is not None:
        cookie = plane.sessions.redeem(body.code)
    elif body.token is not None:
        namespace = await plane.tokens.namespace_of(hashed(body.token.strip()))
        if namespace is None:
            raise Denied(f"this token is unknown here: create one with '{plane.setup.new_token}'")
        cookie = plane.sessions.begin(namespace, hashed(body.token.strip()))
    if cookie is None:
        raise Denied("expected a code or a token")
    session = plane.sessions.find(cookie)
    assert session is not None
    answer = json_answer(SignedIn(csrf=session.csrf, namespace=session.namespace))
    answer.set_cookie(
        plane.sessions.cookie,
        cookie,
        max_age=int(LONGEST_S),
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
