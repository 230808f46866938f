"""Bearer tokens: stored only as hashes, each valid for one namespace."""

from __future__ import annotations

import hashlib
import secrets

from starlette.requests import Request

from atoll.core.errors import Denied
from atoll.server.operations import Plane


def new_token() -> str:
    """A new random token of 256 bits. It is shown once and never stored."""
    return f"atoll_{secrets.token_urlsafe(32)}"


def hashed(token: str) -> str:
    # Tokens are long and random, so a fast hash is as safe as a slow one.
    return hashlib.sha256(token.encode()).hexdigest()


async def caller(plane: Plane, request: Request) -> str:
    """The namespace of the token in the request. Raises Denied if none is valid, and Temporary if
    the namespace has too many connections."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if not token.strip():
        how = plane.setup.new_token
        raise Denied(f"no token: send 'Authorization: Bearer <token>', made with '{how}'")
    if scheme.lower() != "bearer":
        raise Denied(f"expected a Bearer token, got {scheme[:20]!r}")
    namespace = await plane.tokens.namespace_of(hashed(token.strip()))
    if namespace is None:
        how = plane.setup.new_token
        raise Denied(f"this token is unknown here: create one with '{how}'")
    connection = request.scope.get("state", {}).get("connection")
    if connection is not None:  # there is none where the application runs without its own server
        connection.belongs_to(namespace)
    return namespace
