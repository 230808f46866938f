"""Sign-in and sign-out of the dashboard."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta
from starlette.responses import Response

from atoll.core.errors import Denied
from atoll.core.model import Model
from atoll.server.http.auth import (
    check_dashboard_host,
    check_origin,
    cookie_of,
    hash_token,
    token_of,
)
from atoll.server.http.operations import Answer, ApiCall, json_answer
from atoll.server.ui.sessions import MAX_S

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
