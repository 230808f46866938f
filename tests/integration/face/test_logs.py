"""Lines carry a time, ranks are merged by it, and the server searches."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import httpx2
import pytest

import atoll

from .conftest import Plane, Served, until

# Says what the file of its turn holds, when that is there.
SCRIPT = """
for turn in 1 2 3; do
    while [ ! -e {folder}/$RANK.$turn ]; do sleep 0.02; done
    echo rank $RANK turn $turn
done
printf 'half a line'
"""


def command(client: atoll.Client, monkeypatch: pytest.MonkeyPatch, *words: str) -> list[str]:
    address = client.wire.endpoint.address()
    monkeypatch.setenv("ATOLL_URL", address.url)
    monkeypatch.setenv("ATOLL_TOKEN", address.token)
    done = subprocess.run(
        [sys.executable, "-m", "atoll.cli", "logs", *words], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_lines_of_ranks_are_merged_by_time(
    client: atoll.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = time.time()
    script = SCRIPT.format(folder=tmp_path)
    training = client.deploy_distributed("a", command=["sh", "-c", script], world_size=2)
    turns = ["1.1", "0.1", "0.2", "1.2", "1.3", "0.3"]
    middle = 0.0
    for number, turn in enumerate(turns):
        (tmp_path / turn).touch()
        until(lambda: len([x for x in training.logs() if "turn" in x.text]) == number + 1)  # noqa: B023
        if number == 2:
            middle = time.time()
    training.result(60)
    lines = training.logs()
    said = [f"rank {turn[0]} turn {turn[2]}" for turn in turns]
    assert [line.text for line in lines if "turn" in line.text] == said
    assert [line.text for line in lines][-2:] == ["half a line"] * 2
    times = [line.time for line in lines]
    assert all(at is not None and began - 1 <= at <= time.time() + 1 for at in times)
    assert str(lines[0]) == "rank 1 turn 1"
    since = training.logs(since=middle)
    assert [line.text for line in since] == [*said[3:], "half a line", "half a line"]
    assert training.logs(since=datetime.fromtimestamp(middle, UTC)) == since
    assert list(training.logs(follow=True, since=middle)) == since
    assert training.logs(since=time.time() + 100) == []
    assert [x.text for x in training.logs(search="turn 2")] == ["rank 0 turn 2", "rank 1 turn 2"]
    assert [x.text for x in training.logs(rank=1, search="TURN 2", ignore_case=True)] == [said[3]]
    assert [x.text for x in training.logs(search="turn", tail=2)] == [said[4], said[5]]
    assert training.logs(search="TURN 2") == []
    with pytest.raises(atoll.ValidationError, match="search"):
        training.logs(search="")

    dated = command(client, monkeypatch, "a", "--timestamps", "--rank", "1", "--grep", "turn")
    stamp, _, text = dated[0].partition(" ")
    assert text == "rank 1 turn 1"
    assert abs(datetime.fromisoformat(stamp).timestamp() - (lines[0].time or 0)) < 0.002
    told = [json.loads(line) for line in command(client, monkeypatch, "a", "--json")]
    assert [line["time"] for line in told] == times
    after = datetime.fromtimestamp(middle, UTC).isoformat()
    assert len(command(client, monkeypatch, "a", "--since", after)) == 5


def test_the_server_says_where_hits_are_and_reads_around_them(
    client: atoll.Client, plane: Plane
) -> None:
    script = "i=0; while [ $i -lt 3000 ]; do echo line $i of $RANK; i=$((i+1)); done"
    training = client.deploy_distributed("a", command=["sh", "-c", script], world_size=2)
    training.result(60)

    def get(path: str) -> httpx2.Response:
        headers = {"Authorization": f"Bearer {plane.token}"}
        return httpx2.get(f"{plane.url}/v1/trainings/a/{path}", headers=headers)

    def ask(path: str) -> list[dict[str, object]]:
        answer = get(path)
        assert answer.status_code == 200, answer.text
        return [json.loads(line) for line in answer.text.splitlines() if line]

    *hits, end = ask("logs/search?q=LINE+7+&ignoreCase=true")
    assert [(hit["rank"], hit["text"]) for hit in hits] == [(0, "line 7 of 0"), (1, "line 7 of 1")]
    assert end == {"done": True, "hits": 2, "isCut": False, "offsets": {}}
    *hits, end = ask("logs/search?q=line&limit=10&rank=1")
    assert (len(hits), end["hits"], end["isCut"]) == (10, 10, True)
    *more, _ = ask(f"logs/search?q=line&limit=2&rank=1&offsets=1:{hits[-1]['at']}")
    assert more[0]["text"] == "line 10 of 1"
    around = ask(f"logs?rank=1&at={hits[5]['start']}&before=2&after=2")
    assert [line["text"] for line in around] == [f"line {n} of 1" for n in (3, 4, 5, 6)]
    refused = get("logs?at=5")
    assert (refused.status_code, "rank" in refused.text) == (400, True)
    for bad in ("logs/search", "logs/search?q=", "logs/search?q=a%0Ab", "logs?since=x"):
        assert get(bad).status_code == 400, bad


def test_executors_without_files_are_searched_by_their_lines(served: Served) -> None:
    served.create("a")
    answer = served.http.get("/v1/trainings/a/logs/search?q=line+1")
    *hits, end = [json.loads(line) for line in answer.text.splitlines() if line]
    assert [hit["rank"] for hit in hits] == [0, 1]
    assert end["hits"] == 2
    with served.client("two") as other:
        assert other.get("/v1/trainings/a/logs/search?q=line").status_code == 404
    assert served.http.get("/v1/trainings/a/logs?at=1&rank=0").status_code == 400


def test_a_line_of_ten_megabytes_comes_whole_to_the_library_and_to_a_pipe(
    client: atoll.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = (
        "import sys; sys.stdout.write(','.join(f'{n:07d}' for n in range(1_250_000)) + '\\nend\\n')"
    )
    training = client.deploy_distributed("long", command=[sys.executable, "-c", script])
    followed = [line.text for line in training.logs(follow=True)]
    long = ",".join(f"{number:07d}" for number in range(1_250_000))
    assert followed == [long, "end"]
    assert [line.text for line in training.logs()] == [long, "end"]
    assert command(client, monkeypatch, "long") == [f"[0] {long}", "[0] end"]
