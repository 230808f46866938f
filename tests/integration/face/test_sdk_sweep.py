"""`client.map` and `@atoll.distributed` on a real control plane."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from tests.e2e.conftest import Shell, until

import atoll

PATIENCE_S = 60.0


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[atoll.Client]:
    monkeypatch.setenv("ATOLL_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.delenv("ATOLL_URL", raising=False)
    with atoll.Client() as client:
        yield client
    Shell(tmp_path / "state", tmp_path).stop()


def test_values_come_back_typed_and_what_failed_is_named(
    client: atoll.Client, tmp_path: Path
) -> None:
    marks = str(tmp_path)

    def fit(lr: float, depth: int = 2) -> dict[str, Any]:
        import os

        with open(f"{marks}/{os.environ['ATOLL_NAME']}", "a") as mark:
            mark.write("x")
        if depth == 3:
            raise ValueError("too deep")
        return {"loss": lr * depth, "kind": type(lr).__name__}

    settings: list[dict[str, Any]] = [{"lr": 0.5}, {"lr": 2}, {"lr": 0.1, "depth": 3}]
    rows = client.map(fit, settings, concurrency=2)
    assert rows.results == [{"loss": 1.0, "kind": "float"}, {"loss": 4, "kind": "int"}, None]
    assert "too deep" in rows[2].error or "exited with code 1" in rows[2].error
    assert rows[0].training.result() == {"loss": 1.0, "kind": "float"}
    assert [row.phase for row in rows] == ["succeeded", "succeeded", "failed"]
    head, *lines = str(rows).splitlines()
    assert head.split()[:4] == ["lr", "depth", "loss", "kind"]
    assert head.split()[4:] == ["phase", "name", "seconds", "error"]
    assert "ValueError: too deep" in lines[2] or "exited with code 1" in lines[2]
    assert lines[0].split()[:4] == ["0.5", "-", "1", "float"]
    again = asyncio.run(client.map_async(fit, settings, concurrency=1))
    assert again.results == rows.results
    counts = {path.name: len(path.read_text()) for path in tmp_path.glob("fit-*")}
    assert [counts[row.training.spec.name] for row in again] == [1, 1, 2]


def test_a_result_that_cannot_be_returned_is_an_error_of_its_row(client: atoll.Client) -> None:
    def give(size: int) -> Any:
        import pathlib

        return pathlib.PurePosixPath("x") if size == 0 else "x" * size

    settings = [{"size": 1}, {"size": 0}, {"size": 17_000_000}]
    rows = client.map(give, settings, concurrency=1)
    assert rows.results == ["x", None, None]
    assert [row.phase for row in rows] == ["succeeded"] * 3
    assert [bool(row.error) for row in rows] == [False, True, True]
    assert "not a pathlib.PurePosixPath" in rows[1].error
    assert "Client.map" in rows[1].error
    assert "expected at most 16" in rows[2].error
    assert len(rows.failed) == 2
    pickled = client.map(give, settings[:2], concurrency=1, name="pickled", allow_pickle=True)
    assert pickled.results == ["x", PurePosixPath("x")]
    assert not pickled.failed


SCRIPT = """
import sys
import atoll
go = sys.argv[1]

def work(n: int):
    import os, time
    while n > 1 and not os.path.exists(go):
        time.sleep(0.05)
    return n * 10

if __name__ == "__main__":
    print(atoll.Client().map(work, [{"n": n} for n in range(5)], concurrency=2).results)
"""


def test_an_interrupted_map_goes_on_where_it_was(client: atoll.Client, tmp_path: Path) -> None:
    (tmp_path / "sweep.py").write_text(SCRIPT)
    command = [sys.executable, "sweep.py", str(tmp_path / "go")]
    first = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    # Two are done, two run, one waits.
    expected = ["ready", "ready", "succeeded", "succeeded"]
    until(lambda: sorted(t.last.status.phase.value for t in client.list()) == expected)
    uids = {training.name: training.uid for training in client.list()}
    first.send_signal(signal.SIGINT)
    _, err = first.communicate(timeout=PATIENCE_S)
    assert re.search("interrupted with 2 of 5 done; 2 keep running", err)
    (tmp_path / "go").touch()
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    assert done.stdout.strip() == "[0, 10, 20, 30, 40]"
    after = {training.name: training.uid for training in client.list()}
    assert len(after) == 5
    assert uids.items() <= after.items()


def test_a_distributed_function_is_deployed_with_its_arguments(client: atoll.Client) -> None:
    @atoll.distributed(world_size=2)
    def scaled(value: float, by: int = 3) -> float:
        return value * by * int(os.environ.get("WORLD_SIZE", "1"))

    training = scaled.deploy(0.5, by=4)
    training.result(timeout=PATIENCE_S)
    assert training.name.startswith("scaled-")
    assert training.results() == [4.0, 4.0]
    assert scaled.local(0.5) == 1.5
    training._client.close()
