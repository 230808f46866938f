"""How a backend asks its service: through a client library, or by commands."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, ClassVar, TypeVar

from atoll.core.errors import Temporary

T = TypeVar("T")


class ServiceClient:
    """The questions of a backend to its service: counted by name, a few of them at a time.

    A subclass names the errors of its client library, and turns them into atoll's.
    """

    ERRORS: ClassVar[tuple[type[Exception], ...]]

    def __init__(self, at_once: int) -> None:
        self._turns = asyncio.Semaphore(at_once)
        self.questions: Counter[str] = Counter()

    def translate(self, error: Any, question: str) -> Exception:
        """The error as atoll's own: Temporary, Permanent, Denied, NotFound."""
        raise NotImplementedError

    async def ask(
        self,
        question: str,
        call: Callable[[], Awaitable[T]],
        turns: asyncio.Semaphore | None = None,
    ) -> T:
        async with turns or self._turns:
            self.questions[question] += 1
            try:
                return await call()
            except self.ERRORS as error:
                raise self.translate(error, question) from error

    async def ask_thread(self, call: Callable[..., T], /, **arguments: Any) -> T:
        """The same for a call that blocks."""
        return await self.ask(call.__name__, lambda: asyncio.to_thread(call, **arguments))


def one_line(error: object) -> str:
    return " ".join(str(error).split()) or type(error).__name__


async def run_command(
    *arguments: str, env: Mapping[str, str], stdin: str | None = None
) -> tuple[int, str, str]:
    """The status of a command, what it printed, and its errors.

    Raises FileNotFoundError if there is no such command, and Temporary if no process is to be had.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *arguments,
            stdin=asyncio.subprocess.DEVNULL if stdin is None else asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=env,
        )
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Temporary(f"{arguments[0]} cannot be started: {error.strerror}") from error
    try:
        out, trouble = await process.communicate(None if stdin is None else stdin.encode())
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    return process.returncode or 0, out.decode(errors="replace"), trouble.decode(errors="replace")
