"""Errors as HTTP answers: one table from the type of an error to its status."""

from __future__ import annotations

import logging
from typing import Any

from litestar import Request, Response
from litestar.exceptions import HTTPException

from atoll.core import errors
from atoll.core.model import encode
from atoll.core.problem import Problem, problem_of

MEDIA_TYPE = "application/problem+json"

# First match wins, so the more exact type comes first.
STATUS: dict[type[errors.AtollError], int] = {
    errors.ValidationError: 400,
    errors.WorldSizeOutOfBounds: 400,
    errors.Denied: 401,
    errors.NotFound: 404,
    errors.Conflict: 409,
    errors.UDTerminalState: 409,
    errors.Gone: 410,
    errors.Temporary: 503,
    errors.AtollError: 500,
}

log = logging.getLogger(__name__)


def status_of(error: errors.AtollError) -> int:
    return next(status for kind, status in STATUS.items() if isinstance(error, kind))


def problem_response(problem: Problem, **headers: str) -> Response[bytes]:
    return Response(
        encode(problem), status_code=problem.status, media_type=MEDIA_TYPE, headers=headers
    )


def on_atoll_error(request: Request[Any, Any, Any], error: errors.AtollError) -> Response[bytes]:
    headers = {}
    if isinstance(error, errors.Denied):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, errors.Temporary):
        headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
    return problem_response(problem_of(error, status_of(error)), **headers)


def on_http_error(request: Request[Any, Any, Any], error: HTTPException) -> Response[bytes]:
    """What the framework refuses by itself: no such path, no such method, too large a body."""
    headers = dict(error.headers or {})
    detail = f"{request.method} {request.url.path}: {error.detail}"
    if error.status_code == 413:
        headers["Connection"] = "close"
        limit = request.app.request_max_body_size
        size = f"{limit / 2**20:g} MiB" if isinstance(limit, int) else "less"
        detail = f"the body is too large: expected at most {size}"
    title = type(error).__name__.removesuffix("Exception")
    return problem_response(
        Problem(title=title, status=error.status_code, detail=detail), **headers
    )


def on_any_error(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    log.error("%s %s", request.method, request.url.path, exc_info=error)
    detail = "atoll made a mistake; the server's log has the details"
    return problem_response(Problem(title="InternalError", status=500, detail=detail))
