"""Lines in CloudWatch, by places that a reader can go on from."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping
from typing import Any

import boto3
import pytest

from atoll.backends.sagemaker.client import LOG_GROUP, TrainingJobs
from atoll.backends.sagemaker.logs import RankLogs
from atoll.core.status import LogLine
from tests.allreduce.s3server import S3Server


@pytest.fixture
def jobs(aws: S3Server, monkeypatch: pytest.MonkeyPatch) -> TrainingJobs:
    for name, value in aws.environment.items():
        monkeypatch.setenv(name, value)
    logs = boto3.client("logs", region_name="us-east-1")
    if not logs.describe_log_groups(logGroupNamePrefix=LOG_GROUP)["logGroups"]:
        logs.create_log_group(logGroupName=LOG_GROUP)
    return TrainingJobs(boto3.client("sagemaker", region_name="us-east-1"), logs)


def write(jobs: TrainingJobs, job: str, lines: list[tuple[int, str]]) -> None:
    stream = f"{job}/algo-1-1"
    if not jobs._logs.describe_log_streams(logGroupName=LOG_GROUP, logStreamNamePrefix=stream)[
        "logStreams"
    ]:
        jobs._logs.create_log_stream(logGroupName=LOG_GROUP, logStreamName=stream)
    events = [{"timestamp": at, "message": text} for at, text in lines]
    jobs._logs.put_log_events(logGroupName=LOG_GROUP, logStreamName=stream, logEvents=events)


async def read(
    logs: RankLogs, offsets: Mapping[int, int] | None = None, **more: Any
) -> list[LogLine]:
    options = {"ranks": None, "follow": None} | more
    return [line async for line in logs.lines(offsets or {}, **options)]


def test_lines_of_all_attempts_in_order_and_from_a_place_on(jobs: TrainingJobs) -> None:
    now = int(time.time() * 1000) - 10_000
    first, second = f"j{uuid.uuid4().hex}", f"j{uuid.uuid4().hex}"
    write(jobs, first, [(now, "a"), (now, "b"), (now + 5, "c")])
    write(jobs, second, [(now + 9, "d")])

    async def check() -> None:
        logs = RankLogs(jobs, lambda: {0: [first, second], 1: ["j-none"]})
        lines = await read(logs)
        assert [(line.rank, line.text) for line in lines] == [(0, text) for text in "abcd"]
        for at, line in enumerate(lines):
            rest = await read(logs, {0: line.at})  # type: ignore[attr-defined]
            assert "".join(each.text for each in rest) == "abcd"[at + 1 :]
        for tail in range(6):
            offsets = await logs.offsets(tail, None)
            texts = [line.text for line in await read(logs, offsets)]
            assert "".join(texts) == "abcd"[max(4 - tail, 0) :]
        assert await read(logs, ranks=[1]) == []

    asyncio.run(check())


def test_new_lines_are_followed_until_it_is_over(jobs: TrainingJobs) -> None:
    job, now = f"j{uuid.uuid4().hex}", int(time.time() * 1000) - 10_000
    turns = iter("xyz")

    def is_over() -> bool:
        turn = next(turns)
        write(jobs, job, [(now + ord(turn), turn)])
        return turn == "z"

    async def check() -> None:
        logs = RankLogs(jobs, lambda: {0: [job]})
        assert [line.text for line in await read(logs, follow=is_over)] == ["x", "y", "z"]

    asyncio.run(check())
