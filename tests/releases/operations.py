"""Every operation of the SDK once, with whichever atoll is installed. Prints what came of it."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import atoll


def kind_of(error: Exception) -> str:
    return type(error).__name__


def main(prefix: str) -> dict[str, Any]:
    client = atoll.Client()
    said: dict[str, Any] = {}
    name = f"{prefix}-a"
    training = client.deploy_distributed(
        name,
        command=["sh", "-c", "echo rank $RANK; exec sleep 600"],
        world_size=atoll.WorldSize(min=1, target=2, max=3),
        stop_grace_s=0,
        wait="target",
    )
    said["list"] = [t.name for t in client.list(phase="ready", prefix=prefix)]
    training.scale(3)
    said["scaled"] = training.wait_until_target_world(timeout=60).ready
    while len(lines := sorted((x.rank, x.text) for x in training.logs())) < 3:
        time.sleep(0.05)
    said["logs"] = lines
    said["tail"] = [line.text for line in training.logs(rank=1, tail=1)]
    said["get"] = client.get(name).uid == training.uid
    said["reasons"] = len(training.events(since=0.0)) > 0
    said["metrics"] = training.metrics().restarts
    said["usage"] = training.usage.rank_seconds >= 0
    try:
        training.scale(9)
    except atoll.WorldSizeOutOfBounds as error:
        said["out of bounds"] = (error.requested, error.min, error.max)
    training.cancel()
    try:
        training.result(timeout=60)
    except atoll.BelowMinimumWorld as error:
        said["cancelled"] = (training.phase, error.required_min)
    try:
        training.scale(1)
    except atoll.UDTerminalState as error:
        said["over"] = error.phase
    try:
        client.deploy_distributed(name, command=["true"])
    except atoll.Conflict as error:
        said["taken"] = kind_of(error)
    training.delete()
    try:
        client.get(name)
    except atoll.NotFound as error:
        said["gone"] = kind_of(error)
    said["async"] = asyncio.run(alone(client, f"{prefix}-b"))
    return said


async def alone(client: atoll.Client, name: str) -> Any:
    def work() -> None:
        print("worked")

    training = await client.deploy_distributed_async(name, source=work)
    await training.result_async(timeout=60)
    lines = [line.text async for line in training.stream_logs_async()]
    cause = await failing(client, f"{name}-failing")
    await training.delete_async()
    return [lines, cause]


async def failing(client: atoll.Client, name: str) -> Any:
    training = await client.deploy_distributed_async(name, command=["sh", "-c", "echo x; exit 7"])
    try:
        await training.result_async(timeout=60)
    except atoll.BelowMinimumWorld as error:
        (failure,) = error.rank_exits
        await training.delete_async()
        return [failure.rank, failure.exit_code, list(failure.log_tail)]


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
