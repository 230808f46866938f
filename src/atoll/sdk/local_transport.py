"""The connections of httpx2 to the user's own control plane, over its Unix socket."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Any

import httpx2

from atoll.backends.local.state import SOCKET, check_listener
from atoll.sdk.local_http import Unreachable, unreachable

CONNECTED = "connection.connect_unix_socket.complete"  # as httpcore names it


class LocalTransport(httpx2.AsyncHTTPTransport):
    """Raises Unreachable where nobody listens, and Permanent where another user does, in both
    cases before anything is sent."""

    def __init__(self, directory: Path, limits: httpx2.Limits) -> None:
        self._directory = directory
        try:
            file = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise Unreachable(unreachable(directory, error)) from error
        weakref.finalize(self, os.close, file)
        # By the open file, as the address of a socket is short and a directory may be long.
        super().__init__(uds=f"/proc/self/fd/{file}/{SOCKET}", limits=limits)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        request.extensions = {**request.extensions, "trace": self._check_peer}
        try:
            return await super().handle_async_request(request)
        except httpx2.ConnectError as error:
            raise Unreachable(unreachable(self._directory, _cause(error))) from error

    async def _check_peer(self, event: str, info: dict[str, Any]) -> None:
        """httpcore calls this for a new connection before it uses it."""
        if event == CONNECTED:
            stream = info["return_value"]
            try:
                check_listener(stream.get_extra_info("socket"), self._directory)
            except BaseException:
                await stream.aclose()
                raise


def _cause(error: BaseException) -> OSError:
    """The error of the kernel; libraries wrap it several times."""
    while (inner := error.__cause__ or error.__context__) is not None:
        if isinstance(inner, OSError):
            return inner
        error = inner
    return OSError(0, str(error))
