"""Results of ranks through the control plane: `result`, and logs without them."""

from __future__ import annotations

import asyncio
import base64
import os
import pickle
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import atoll
from atoll import ValidationError


@pytest.fixture(scope="module")
def client() -> Iterator[atoll.Client]:
    with atoll.Client.local() as made:
        yield made


def ended(client: atoll.Client, name: str, **options: Any) -> atoll.DistributedTraining:
    training = client.deploy_distributed(name, **options)
    training.wait_until_complete(timeout=60)
    return training


def test_what_a_function_returned_on_each_rank(client: atoll.Client) -> None:
    def work() -> Any:
        sys.stdout.write("one\ntwo\n")
        return {"rank": int(os.environ["RANK"]), "pair": (1, b"\0")}

    training = ended(client, "returns", source=work, world_size=2)
    assert training.result() == {"rank": 0, "pair": (1, b"\0")}
    assert training.results()[1]["rank"] == 1
    assert asyncio.run(training.results_async()) == training.results()
    assert asyncio.run(client.get("returns").result_async(timeout=0))["rank"] == 0
    # Results are not lines of the log, however it is read.
    assert [line.text for line in training.logs(rank=0)] == ["one", "two"]
    assert [line.text for line in training.logs(rank=0, tail=1)] == ["two"]
    assert [line.text for line in training.stream_logs([0])] == ["one", "two"]
    assert {line.rank for line in training.logs(tail=1)} == {0, 1}
    for timeout in (-1, "0"):
        with pytest.raises(ValidationError, match="timeout"):
            client.get("returns").result(timeout)  # type: ignore[arg-type]


def test_the_result_is_waited_for(client: atoll.Client, tmp_path: Path) -> None:
    def work() -> int:
        while not (tmp_path / "go").exists():
            time.sleep(0.01)
        return 7

    training = client.deploy_distributed("waits", source=work)
    with pytest.raises(atoll.BelowMinimumWorld):
        training.result(timeout=0)
    (tmp_path / "go").touch()
    assert training.result(timeout=60) == training.result() == 7


PROGRAM = """
import atoll, sys
atoll.set_result({"loss": 2.0})
atoll.set_result({"loss": 0.5, "big": "x" * 50_000})
print("done")
"""


def test_what_a_program_gave_last(client: atoll.Client) -> None:
    training = ended(client, "gives", command=[sys.executable, "-c", PROGRAM])
    value = training.result()
    assert (value["loss"], len(value["big"])) == (0.5, 50_000)
    assert [line.text for line in training.logs(tail=3)] == ["done"]


def test_the_result_of_a_program_that_sets_none_is_none(client: atoll.Client) -> None:
    training = ended(client, "nothing", command=["sh", "-c", "seq 1 200"])
    assert training.result() is None
    assert training.results() == [None]
    assert [line.text for line in training.logs(tail=2)] == ["199", "200"]


TORN = """
import os
open(os.environ["ATOLL_RESULT"], "w").write('{"encoding": "json", "bytes": 9000}\\n1')
"""


def nested() -> Any:
    own: list[Any] = []
    own.append(own)
    return own


LOST: dict[str, tuple[dict[str, Any], str]] = {
    "odd": ({"source": lambda: Path("x")}, r"not a pathlib.*Path: .*allow_pickle=True"),
    "large": ({"source": lambda: "x" * 17_000_000}, "has 16 MiB, expected at most 16: write it to"),
    "nested": ({"source": nested}, "nested too deeply, or holds itself"),
    "torn": ({"command": [sys.executable, "-c", TORN]}, "the result is damaged"),
}


@pytest.mark.parametrize("name", LOST)
def test_why_a_result_cannot_be_had_is_told_to_whoever_asks(
    client: atoll.Client, name: str
) -> None:
    options, why = LOST[name]
    training = ended(client, name, **options)
    assert training.phase == "succeeded"
    with pytest.raises(atoll.ResultError, match=why):
        training.result()
    with pytest.raises(atoll.ResultError, match=why):
        asyncio.run(training.result_async())
    with pytest.raises(atoll.ResultError, match=why):
        training.results()


class Evil:
    def __init__(self, place: str) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return os.mkdir, (self.place,)


def test_a_pickle_needs_both_sides(client: atoll.Client, tmp_path: Path) -> None:
    evil = base64.b64encode(pickle.dumps(Evil(str(tmp_path / "ran")))).decode()
    program = (
        "import os, base64\nfrom atoll.agent.result import Result, write_result\n"
        f"result = Result('pickle', base64.b64decode({evil!r}))\n"
        "write_result(os.environ['ATOLL_RESULT'], result)\n"
    )
    training = ended(client, "evil", command=[sys.executable, "-c", program])
    with pytest.raises(ValueError, match="allow_pickle"):
        training.result()
    assert not (tmp_path / "ran").exists()
    program = "import atoll, pathlib\natoll.set_result(pathlib.Path('x'), pickled=True)"
    training = ended(client, "both", command=[sys.executable, "-c", program])
    with pytest.raises(ValueError, match="allow_pickle"):
        training.result()
    assert training.result(allow_pickle=True) == Path("x")


def test_a_log_is_what_a_rank_printed_and_holds_no_result(client: atoll.Client) -> None:
    program = "import atoll; print('\\x1eatoll-result 0 1'); atoll.set_result(7); print('seen')"
    training = ended(client, "printed", command=[sys.executable, "-c", program])
    assert training.result() == 7
    assert [line.text for line in training.logs()] == ["\x1eatoll-result 0 1", "seen"]


def test_a_restart_without_a_result_has_none(client: atoll.Client) -> None:
    program = (
        "import os, sys, atoll\nif os.environ['ATOLL_ATTEMPT'] == '0':\n"
        "    atoll.set_result('of the first'); sys.exit(1)\n"
    )
    command = [sys.executable, "-c", program]
    training = ended(client, "again", command=command, max_restarts=1)
    assert training.result() is None


def test_the_last_lines_of_a_failed_rank_are_what_it_printed(client: atoll.Client) -> None:
    program = "import atoll, sys; print('why'); atoll.set_result(1); sys.exit(3)"
    training = client.deploy_distributed("fails", command=[sys.executable, "-c", program])
    with pytest.raises(atoll.BelowMinimumWorld):
        training.result(timeout=60)
    assert training.root_cause is not None
    assert training.root_cause.log_tail == ["why"]
    with pytest.raises(atoll.BelowMinimumWorld, match="exit_code=3"):
        client.get("fails").result()
