"""How the basilica-sdk client is answered, and refused: its bodies, codes and headers."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import NamedTuple

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from atoll.core.errors import AtollError, ValidationError
from atoll.core.fields import renamed
from atoll.core.model import encode
from atoll.server.basilica.request import FIELDS
from atoll.server.basilica.wire import Json, moment
from atoll.server.operations import JSON, Answer
from atoll.server.problems import status_of

CLOSE = {"Connection": "close"}
# Parts of that platform which have no counterpart here, by the path they live under.
UNSUPPORTED: dict[str, str] = {
    "/rentals": "rentals: atoll runs trainings on machines you have, it does not rent any",
    "/nodes": "nodes: atoll runs trainings on machines you have, it does not rent any",
    "/v2/secure-cloud": "rentals: atoll runs trainings on machines you have, it rents none",
    "/secure-cloud": "rentals: atoll runs trainings on machines you have, it rents none",
    "/ssh-keys": "SSH keys: there is no rented machine to log in to",
    "/billing": "billing: nothing is charged; `atoll status` shows what a training has used",
    "/rl": "reinforcement-learning clusters",
    "/deployments/{name}/share-token": "share links: a token is good for its whole namespace",
    "/deployments/{name}/enroll-metadata": "public metadata: nothing is shown without a token",
    "/public": "public metadata: nothing is shown without a token",
}

log = logging.getLogger(__name__)


class Unsupported(AtollError):
    """That platform has it, atoll does not."""


def said(body: Json, status: int = 200) -> Answer:
    return Response(encode(body), status, headers=CLOSE, media_type=JSON)


class Shown(NamedTuple):
    code: str
    is_retryable: bool = False


CODES: Mapping[int, Shown] = {
    400: Shown("BASILICA_API_BAD_REQUEST"),
    401: Shown("BASILICA_API_AUTH_FAILED"),
    404: Shown("BASILICA_API_NOT_FOUND"),
    409: Shown("BASILICA_API_CONFLICT"),
    413: Shown("BASILICA_API_TOO_LARGE"),
    501: Shown("BASILICA_API_NOT_SUPPORTED"),
    503: Shown("BASILICA_API_UNAVAILABLE", is_retryable=True),
}


def refused(status: int, message: str) -> Answer:
    shown = CODES.get(status, Shown("BASILICA_API_ERROR"))
    error = {
        "code": shown.code,
        "message": message,
        "timestamp": moment(time.time()),
        "retryable": shown.is_retryable,
    }
    return said({"error": error}, status)


def on_error(request: Request, error: Exception) -> Answer:
    """Any error of a request, in the client's words."""
    if isinstance(error, Unsupported):
        return refused(501, str(error))
    if isinstance(error, ValidationError):
        return refused(400, str(renamed(error, FIELDS)))
    if isinstance(error, AtollError):
        return refused(status_of(error), str(error))
    if isinstance(error, HTTPException):
        return refused(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    log.error("%s %s", request.method, request.url.path, exc_info=error)
    return refused(500, "atoll made a mistake; the server's log has the details")
