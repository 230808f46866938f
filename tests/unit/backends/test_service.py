"""Questions to a service: counted, a few at a time, with errors of atoll's own."""

from __future__ import annotations

import asyncio

import pytest

from atoll.backends.service import ServiceClient, run_command
from atoll.core.errors import Permanent


class Client(ServiceClient):
    ERRORS = (LookupError,)

    def translate(self, error: Exception, question: str) -> Exception:
        return Permanent(f"{question}: {error}")


def test_an_error_of_the_client_becomes_ours_and_others_pass() -> None:
    def look_up(key: str) -> None:
        raise KeyError(key)

    def compute() -> None:
        raise ZeroDivisionError

    async def work() -> None:
        client = Client(1)
        with pytest.raises(Permanent, match="look_up: 'a'"):
            await client.ask_thread(look_up, key="a")
        with pytest.raises(ZeroDivisionError):
            await client.ask_thread(compute)
        assert client.questions == {"look_up": 1, "compute": 1}

    asyncio.run(work())


def test_only_so_many_questions_are_under_way() -> None:
    async def work() -> None:
        client, answered, begun = Client(2), asyncio.Event(), []

        async def call() -> None:
            begun.append(1)
            await answered.wait()

        asking = [asyncio.create_task(client.ask("q", call)) for _ in range(6)]
        for _ in range(50):  # whoever may begin has begun
            await asyncio.sleep(0)
        assert len(begun) == 2
        answered.set()
        await asyncio.gather(*asking)
        assert len(begun) == client.questions["q"] == 6

    asyncio.run(work())


def test_a_command_gives_its_status_its_output_and_its_errors() -> None:
    script = "cat; echo bad >&2; exit 3"
    done = asyncio.run(run_command("sh", "-c", script, env={"PATH": "/bin:/usr/bin"}, stdin="in"))
    assert done == (3, "in", "bad\n")
    with pytest.raises(FileNotFoundError):
        asyncio.run(run_command("no-such-command", env={}))
