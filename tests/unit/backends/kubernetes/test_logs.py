"""Logs of pods, from a cluster whose streams break, come late or cannot be read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from atoll.backends.kubernetes import logs
from atoll.backends.kubernetes.client import Mirror
from atoll.backends.kubernetes.logs import LogSource, follow_logs, read_logs
from atoll.backends.kubernetes.names import UID
from atoll.backends.kubernetes.pod import Pod
from atoll.core.errors import AtollError, NotFound, Permanent, Temporary
from atoll.core.status import LogLine
from tests.unit.backends.kubernetes.kube import Json, ended, pod, running, training

SECOND = 10**9


class Streams:
    """What each request for the log of a rank brings: lines by nanosecond, or an error."""

    def __init__(self, *answers: Sequence[tuple[int, str] | Exception]) -> None:
        self._answers = list(answers)
        self.after: list[int] = []  # where each request began

    async def log_with_times(
        self,
        namespace: str,
        pod: str,
        *,
        after: int = 0,
        tail: int | None = None,
        follow: bool = False,
    ) -> AsyncIterator[tuple[int, str]]:
        self.after.append(after)
        for item in self._answers.pop(0) if self._answers else ():
            if isinstance(item, Exception):
                raise item
            if item[0] > after:
                yield item


def source_of(streams: Streams, *pods: Json, archived: Sequence[str] = ()) -> LogSource:
    class Nothing:
        async def lines(self, namespace: str, uid: str, rank: int) -> list[str]:
            return list(archived)

    cluster: Any = streams
    mirror = Mirror(cluster, "pods", None, Pod, lambda labels: None)
    mirror.is_live = True
    for manifest in pods:
        manifest["metadata"]["labels"] = {UID: training().uid}
        mirror.put(manifest)
    return LogSource(cluster, training(), "team-a", mirror, Nothing())  # type: ignore[arg-type]


async def read(lines: AsyncIterator[LogLine]) -> list[tuple[int, str]]:
    async with asyncio.timeout(60):
        return [(line.rank, line.text) async for line in lines]


@pytest.mark.parametrize("broken", [Temporary("the connection broke"), Permanent("no container")])
def test_a_followed_log_goes_on_where_it_broke_off(
    broken: AtollError, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every line once, however often the stream breaks, and whether it says so or just ends."""
    monkeypatch.setattr(logs, "POLL_S", 0.01)
    whole = [(SECOND + n, f"line {n}") for n in range(6)]
    streams = Streams([*whole[:2], broken], [broken], whole[:4], whole)

    async def test() -> list[tuple[int, str]]:
        source = source_of(streams, pod(0, running()))

        def is_over() -> bool:
            if len(streams.after) >= 4:
                over = pod(0, ended(0), phase="Succeeded")
                over["metadata"]["labels"] = {UID: training().uid}
                source.mirror.put(over)
            return len(streams.after) >= 5

        return await read(follow_logs(source, {}, ranks=None, is_over=is_over))

    assert asyncio.run(test()) == [(0, text) for _, text in whole]
    assert streams.after[:4] == [0, whole[1][0], whole[1][0], whole[3][0]]


def test_a_log_that_cannot_be_read_is_an_error_and_not_an_empty_one() -> None:
    def read_one(*answers: Sequence[tuple[int, str] | Exception]) -> list[tuple[int, str]]:
        source = source_of(Streams(*answers), pod(0, running()))
        return asyncio.run(read(read_logs(source, ranks=[0], tail=10, follow=None)))

    with pytest.raises(Temporary, match="500"):
        read_one([Temporary("500: the kubelet does not answer")])
    assert read_one([Permanent("its container waits to start")]) == []
    assert read_one([NotFound("pods", "a")]) == []


def test_of_many_ranks_those_that_can_be_read_are_shown() -> None:
    streams = Streams([Temporary("its kubelet does not answer")], [(SECOND, "hello")])
    source = source_of(streams, pod(0, running()), pod(1, running()))
    found = dict(asyncio.run(read(read_logs(source, ranks=None, tail=None, follow=None))))
    assert found[1] == "hello"
    assert found[0] == "[the log of rank 0 cannot be read: its kubelet does not answer]"


@pytest.mark.parametrize("follow", [None, lambda: True])
def test_a_launch_has_the_logs_of_pods_that_only_its_launcher_knew(follow: Any) -> None:
    async def test(*, is_shared: bool) -> list[tuple[int, str]]:
        streams = Streams([(SECOND, "here")])
        source = source_of(streams, pod(0, ended(0)), archived=["old", "last"])
        source = source._replace(is_shared=is_shared)
        return await read(read_logs(source, ranks=[0, 1], tail=None, follow=follow))

    lines = asyncio.run(test(is_shared=True))
    assert [text for rank, text in lines if rank == 1] == ["old", "last"]
    assert (0, "here") in lines
    assert asyncio.run(test(is_shared=False)) == [(0, "here")]
