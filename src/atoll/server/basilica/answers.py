"""Answers and errors in the format of the basilica-sdk client: bodies, codes, headers."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import NamedTuple

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from atoll.core.errors import AtollError, ValidationError
from atoll.core.fields import rename_fields
from atoll.core.model import encode
from atoll.server.basilica.request import FIELDS
from atoll.server.basilica.wire import Json, timestamp
from atoll.server.http.operations import JSON, Answer
from atoll.server.http.problems import status_of

CLOSE = {"Connection": "close"}
# Parts of the Basilica platform that atoll does not have, by path.
UNSUPPORTED: dict[str, str] = {
    "/rentals": "rentals: atoll runs trainings on machines you have, it does not rent any",
    "/nodes": "nodes: atoll runs trainings on machines you have, it does not rent any",
    "/v2/secure-cloud": "rentals: atoll runs trainings on machines you have, it rents none",
    "/secure-cloud": "rentals: atoll runs trainings on machines you have, it rents none",
    "/ssh-keys": "SSH keys: there is no rented machine to log in to",
    "/billing": "billing: nothing is charged; `atoll status` shows what a training has used",
    "/rl": "reinforcement-learning clusters",
    "/deployments/{name}/share-token": "share links: a token is good for its whole namespace",
    "/deployments/{name}/enroll-metadata": "public metadata: every request needs a token",
    "/public": "public metadata: every request needs a token",
}

log = logging.getLogger(__name__)


class Unsupported(AtollError):
    """The Basilica platform has this, atoll does not."""


def answer(body: Json, status: int = 200) -> Answer:
    """JSON that closes its connection."""
    return Response(encode(body), status, headers=CLOSE, media_type=JSON)


class ErrorCode(NamedTuple):
    """How the client names one kind of error, and whether it may retry."""

    name: str
    is_retryable: bool = False


CODES: Mapping[int, ErrorCode] = {
    400: ErrorCode("BASILICA_API_BAD_REQUEST"),
    401: ErrorCode("BASILICA_API_AUTH_FAILED"),
    404: ErrorCode("BASILICA_API_NOT_FOUND"),
    409: ErrorCode("BASILICA_API_CONFLICT"),
    413: ErrorCode("BASILICA_API_TOO_LARGE"),
    501: ErrorCode("BASILICA_API_NOT_SUPPORTED"),
    503: ErrorCode("BASILICA_API_UNAVAILABLE", is_retryable=True),
}


def error_answer(status: int, message: str) -> Answer:
    error_code = CODES.get(status, ErrorCode("BASILICA_API_ERROR"))
    error = {
        "code": error_code.name,
        "message": message,
        "timestamp": timestamp(time.time()),
        "retryable": error_code.is_retryable,
    }
    return answer({"error": error}, status)


def on_error(request: Request, error: Exception) -> Answer:
    """Any error of a request as the error body that the client reads."""
    if isinstance(error, Unsupported):
        return error_answer(501, str(error))
    if isinstance(error, ValidationError):
        return error_answer(status_of(error), str(rename_fields(error, FIELDS)))
    if isinstance(error, AtollError):
        return error_answer(status_of(error), str(error))
    if isinstance(error, HTTPException):
        return error_answer(
            error.status_code, f"{request.method} {request.url.path}: {error.detail}"
        )
    log.error("%s %s", request.method, request.url.path, exc_info=error)
    return error_answer(500, "internal error in atoll; the log of the server has the details")
