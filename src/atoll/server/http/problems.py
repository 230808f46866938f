"""Errors as HTTP answers: one table maps the type of an error to its status."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from atoll.core import errors
from atoll.core.model import encode
from atoll.core.problem import Problem, problem_of

MEDIA_TYPE = "application/problem+json"

# First match wins, so the more exact type comes first.
STATUS: dict[type[errors.AtollError], int] = {
    errors.TooLarge: 413,
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


def on_error(request: Request, error: Exception) -> Response:
    """Any error of a request as a problem document."""
    if isinstance(error, errors.AtollError):
        return _answer(problem_of(error, status_of(error)), _headers(error))
    if isinstance(error, HTTPException):
        return _answer(_refusal(request, error), _headers(error))
    log.error("%s %s", request.method, request.url.path, exc_info=error)
    detail = "internal error in atoll; the log of the server has the details"
    return _answer(Problem(title="InternalError", status=500, detail=detail), {})


def _answer(problem: Problem, headers: Mapping[str, str]) -> Response:
    return Response(encode(problem), problem.status, headers=headers, media_type=MEDIA_TYPE)


def _headers(error: errors.AtollError | HTTPException) -> Mapping[str, str]:
    if isinstance(error, errors.Denied):
        return {"WWW-Authenticate": "Bearer"}
    if isinstance(error, errors.Temporary):
        return {"Retry-After": str(max(1, round(error.retry_after_s)))}
    if isinstance(error, HTTPException):
        return error.headers or {}
    return {"Connection": "close"} if isinstance(error, errors.TooLarge) else {}


def _refusal(request: Request, error: HTTPException) -> Problem:
    """Errors raised before a handler runs: no such path, no such method."""
    detail = f"{request.method} {request.url.path}: {error.detail}"
    title = HTTPStatus(error.status_code).phrase.replace(" ", "")
    return Problem(title=title, status=error.status_code, detail=detail)
