"""What atoll asks of Hugging Face, through `huggingface_hub`: the only module that imports it.

The client blocks, so each request is in a thread. Its errors are atoll's from here on.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from typing import Any

import httpx2
import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError

from atoll.backends.service import ServiceClient, one_line
from atoll.core.errors import Denied, NotFound, Permanent, Temporary

CREDENTIALS = "Hugging Face needs a token: 'hf auth login' writes one, or set HF_TOKEN"
LIST_S = 10.0  # the client asks again for half a minute, while ends of ranks wait in the records
TAIL = 5  # lines of a job that ended before it ran anything of ours
REFUSED = (400, 409, 413, 422)  # what the Hub will answer again; 402 is a bill, which may be paid


def check_credentials() -> None:
    """Raises Permanent, with what to do, if this machine has no token. Nobody is asked."""
    if not huggingface_hub.get_token():
        raise Permanent(CREDENTIALS)


class Jobs(ServiceClient):
    """The jobs of one namespace."""

    ERRORS = (HfHubHTTPError, httpx2.HTTPError, OSError)

    def __init__(self, namespace: str | None, at_once: int) -> None:
        super().__init__(at_once)
        self._namespace = namespace
        self._api = huggingface_hub.HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None)

    def translate(self, error: Exception, question: str) -> Exception:
        text = f"Hugging Face, {question}: {one_line(error)}"
        if not isinstance(error, HfHubHTTPError):
            return Temporary(text, retry_after_s=1.0)
        status = error.response.status_code if error.response is not None else 0
        text = f"Hugging Face, {question}: {error.server_message or one_line(error)}"
        if status in (401, 403):
            return Denied(f"{text}: {CREDENTIALS}, with the right to run jobs")
        if status == 404:
            return NotFound("job", question)
        return Permanent(text) if status in REFUSED else Temporary(text, retry_after_s=2.0)

    async def namespace(self) -> str:
        """Whose jobs these are: by default of the token's owner."""
        if self._namespace is None:
            self._namespace = str((await self.ask_thread(self._api.whoami))["name"])
        return self._namespace

    async def start(self, request: dict[str, Any]) -> str:
        """The id of the new job. Raises Permanent if a secret is not set on this machine."""
        values = {name: os.environ.get(name) for name in request["secrets"]}
        if missing := [name for name, value in values.items() if value is None]:
            raise Permanent(f"secrets: {', '.join(missing)} not set where the control plane runs")
        request = request | {"secrets": values, "namespace": await self.namespace()}
        return str((await self.ask_thread(self._api.run_job, **request)).id)

    async def find(self, labels: dict[str, str]) -> list[Any]:
        """All jobs that have the labels, whether they run or not: one question, in pages."""
        namespace = await self.namespace()

        def list_jobs() -> list[Any]:
            return list(self._api.list_jobs(labels=labels, namespace=namespace))

        async def answer() -> list[Any]:
            async with asyncio.timeout(LIST_S):
                return await asyncio.to_thread(list_jobs)

        return await self.ask("list_jobs", answer)

    async def inspect(self, job_id: str) -> Any:
        return await self.ask_thread(
            self._api.inspect_job, job_id=job_id, namespace=await self.namespace()
        )

    async def cancel(self, job_id: str) -> None:
        """Already ended or unknown is success."""
        try:
            await self.ask_thread(
                self._api.cancel_job, job_id=job_id, namespace=await self.namespace()
            )
        except NotFound:
            return
        except Permanent:
            if (await self.inspect(job_id)).status.stage in ("RUNNING", "SCHEDULING"):
                raise

    async def last_lines(self, job_id: str) -> list[str]:
        """What a job printed last, as Hugging Face has it."""
        namespace = await self.namespace()

        def fetch_job_logs() -> list[str]:
            lines = self._api.fetch_job_logs(job_id=job_id, namespace=namespace, tail=TAIL)
            return [*itertools.islice(lines, TAIL)]

        return await self.ask_thread(fetch_job_logs)
