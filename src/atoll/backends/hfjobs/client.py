"""What atoll asks of Hugging Face, through `huggingface_hub`: the only module that imports it.

The client blocks, so each request is in a thread. Its errors are atoll's from here on.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import httpx2
import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError

from atoll.core.errors import Denied, NotFound, Permanent, Temporary

T = TypeVar("T")

CREDENTIALS = "Hugging Face needs a token: 'hf auth login' writes one, or set HF_TOKEN"
TAIL = 5  # lines of a job that ended before it ran anything of ours
REFUSED = (400, 409, 413, 422)  # what the Hub will answer again; 402 is a bill, which may be paid


def check_credentials() -> None:
    """Raises Permanent, with what to do, if this machine has no token. Nobody is asked."""
    if not huggingface_hub.get_token():
        raise Permanent(CREDENTIALS)


class Jobs:
    """The jobs of one namespace. `questions` counts what was asked, by the call."""

    def __init__(self, namespace: str | None, at_once: int) -> None:
        self._namespace = namespace
        self._api = huggingface_hub.HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None)
        self._turns = asyncio.Semaphore(at_once)
        self.questions: Counter[str] = Counter()

    async def namespace(self) -> str:
        """Whose jobs these are: by default of the token's owner."""
        if self._namespace is None:
            self._namespace = str((await self._ask(self._api.whoami))["name"])
        return self._namespace

    async def start(self, request: dict[str, Any]) -> str:
        """The id of the new job. Raises Permanent if a secret is not set on this machine."""
        values = {name: os.environ.get(name) for name in request["secrets"]}
        if missing := [name for name, value in values.items() if value is None]:
            raise Permanent(f"secrets: {', '.join(missing)} not set where the control plane runs")
        request = request | {"secrets": values, "namespace": await self.namespace()}
        return str((await self._ask(self._api.run_job, **request)).id)

    async def find(self, labels: dict[str, str]) -> list[Any]:
        """All jobs that have the labels, whether they run or not: one question, in pages."""
        namespace = await self.namespace()
        return await self._ask(
            lambda: list(self._api.list_jobs(labels=labels, namespace=namespace)), name="list_jobs"
        )

    async def inspect(self, job_id: str) -> Any:
        return await self._ask(
            self._api.inspect_job, job_id=job_id, namespace=await self.namespace()
        )

    async def cancel(self, job_id: str) -> None:
        """Already ended or unknown is success."""
        try:
            await self._ask(self._api.cancel_job, job_id=job_id, namespace=await self.namespace())
        except NotFound:
            return
        except Permanent:
            if (await self.inspect(job_id)).status.stage in ("RUNNING", "SCHEDULING"):
                raise

    async def last_lines(self, job_id: str) -> list[str]:
        """What a job printed last, as Hugging Face has it."""
        namespace = await self.namespace()

        def read() -> list[str]:
            lines = self._api.fetch_job_logs(job_id=job_id, namespace=namespace, tail=TAIL)
            return [*itertools.islice(lines, TAIL)]

        return await self._ask(read, name="fetch_job_logs")

    async def _ask(self, call: Callable[..., T], *, name: str = "", **arguments: Any) -> T:
        name = name or call.__name__
        async with self._turns:
            self.questions[name] += 1
            try:
                return await asyncio.to_thread(call, **arguments)
            except HfHubHTTPError as error:
                raise _translate(error, name) from error
            except (httpx2.HTTPError, OSError) as error:
                text = f"Hugging Face, {name}: {_line(error)}"
                raise Temporary(text, retry_after_s=1.0) from error


def _translate(error: HfHubHTTPError, name: str) -> Exception:
    status = error.response.status_code if error.response is not None else 0
    text = f"Hugging Face, {name}: {error.server_message or _line(error)}"
    if status in (401, 403):
        return Denied(f"{text}: {CREDENTIALS}, with the right to run jobs")
    if status == 404:
        return NotFound("job", name)
    return Permanent(text) if status in REFUSED else Temporary(text, retry_after_s=2.0)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
