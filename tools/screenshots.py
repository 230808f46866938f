"""The pictures of the dashboard in `docs/images`: `python -m tools.screenshots` makes them anew.

What they show is invented, and drawn by the real pages in a real Chromium.
"""

from __future__ import annotations

import base64
import math
import random
import time
from pathlib import Path
from typing import Any

from tests.e2e.browser import open_browser
from tests.support.crowded_plane import CrowdedPlane, crowded_plane, large, losing, training

from atoll.core.phase import Phase
from atoll.core.rounds import ReportedRound, RoundCost, RoundFacts
from atoll.core.spec import WorldSize
from atoll.core.status import (
    AttemptStatus,
    Event,
    Exit,
    LogLine,
    RankExit,
    RankStatus,
    Resize,
    Status,
    Training,
    WorldPoint,
    WorldStatus,
)

IMAGES = Path(__file__).parents[1] / "docs" / "images"
QUALITY = 72
MAX_BYTES = 600_000
FAILED = "gpt-125m-fineweb"
# Name, address, what to wait for, width, height, theme.
SHOTS = (
    ("list-light", "/", "table.list a.name", 1440, 900, "light"),
    ("list-phone", "/", "table.list a.name", 390, 844, "dark"),
    ("training-light", f"/t/{FAILED}", ".chart canvas", 1440, 1900, "light"),
    ("training-dark", f"/t/{FAILED}", ".chart canvas", 1440, 1200, "dark"),
    ("training-phone", f"/t/{FAILED}", "#cause", 390, 844, "dark"),
    ("rank-light", f"/t/{FAILED}/r/6", ".side pre", 1440, 900, "light"),
    ("ranks-1000-light", "/t/llama-1b-diloco", ".mosaic canvas", 1440, 900, "light"),
    ("compare-light", "/compare?t=sweep-lr-07&t=sweep-lr-08&t=sweep-lr-09", ".u-over", 1440, 900,
     "light"),
)  # fmt: skip


def failed(now: float) -> tuple[Training, list[Event], list[AttemptStatus]]:
    """A scale-up that ran out of memory."""
    start, resize, cause = now - 6720, now - 1432, now - 720
    size = WorldSize(min=6, target=8, max=8)
    killed = {"exit_code": 137, "termination_reason": "OOMKilled", "signal": "SIGKILL"}
    tail = [
        "step 22031 loss 3.061 tok/s 18.2k",
        "W loader: worker 3 slow, 2.9 s for a batch",
        "step 22032 loss 3.058 tok/s 6.1k",
        "MemoryError: cannot allocate 1.07 GiB for shard 0412",
    ]
    exits, ranks, attempts = [], [], []
    for rank in range(8):
        host = f"node-{'aabbcccc'[rank]}"
        began = start if rank < 6 else resize + 210
        is_lost, ended = rank >= 5, cause + {5: 9, 6: 0, 7: 6}.get(rank, 10)
        if is_lost:
            again = cause - 260 + 8 * rank
            attempts.append(
                AttemptStatus(
                    rank=rank,
                    attempt=0,
                    started_at=began,
                    ended_at=again - 4,
                    exit_code=137,
                    reason="OOMKilled",
                    signal="SIGKILL",
                    host=host,
                )  # fmt: skip
            )
            began = again
        previous = Exit(code=137, at=began - 4, reason="OOMKilled", signal="SIGKILL")
        ranks.append(
            RankStatus(
                rank=rank,
                phase="Failed" if is_lost else "Stopped",
                node=host,
                attempt=int(is_lost),
                restarts=int(is_lost),
                started_at=began,
                previous=previous if is_lost else None,
                pod_name=f"{FAILED}-{rank}",
            )  # fmt: skip
        )
        end: dict[str, Any] = (
            killed if is_lost else {"exit_code": 143, "termination_reason": "Stopped"}
        )
        exits.append(
            RankExit(
                rank=rank,
                restart_count=int(is_lost),
                started_at=began,
                ended_at=ended,
                host=host,
                collateral=not is_lost,
                log_tail=tail if rank == 6 else [],
                **end,
            )  # fmt: skip
        )
    status = Status(
        phase=Phase.FAILED,
        world=WorldStatus.of(0, size),
        ranks=ranks,
        rank_exits=exits,
        root_cause=exits[6],
        started_at=start,
        ended_at=cause + 15,
        last_resize=Resize(from_target=6, to_target=8, at=resize),
        world_size_history=[
            WorldPoint(at=start, target=6, ready=6),
            WorldPoint(at=start + 2500, target=6, ready=5),
            WorldPoint(at=start + 2560, target=6, ready=6),
            WorldPoint(at=resize, target=8, ready=6),
            WorldPoint(at=resize + 210, target=8, ready=8),
            WorldPoint(at=cause - 230, target=8, ready=5),
            WorldPoint(at=cause - 200, target=8, ready=8),
            WorldPoint(at=cause + 9, target=8, ready=5),
            WorldPoint(at=cause + 15, target=8, ready=0),
        ],
    )
    events = [
        Event(type="Normal", reason="Scaled", message="target 6 -> 8", at=resize),
        Event(type="Normal", reason="RanksStarted", message="started: 6-7", at=resize + 210),
        Event(
            type="Warning",
            reason="RankRestarting",
            message="ranks 5-7: out of memory (SIGKILL)",
            at=cause - 230,
        ),
        Event(
            type="Warning",
            reason="RankLost",
            message="rank 6: out of memory (SIGKILL), no restarts left",
            at=cause,
        ),
        Event(
            type="Warning",
            reason="RankLost",
            message="ranks 5, 7: out of memory (SIGKILL)",
            at=cause + 9,
        ),
        Event(
            type="Warning",
            reason="Failed",
            message="5 ranks can still run, min is 6",
            at=cause + 15,
        ),
    ]
    made = training(FAILED, status, target=8, least=6, at=start - 20)
    return made, events, attempts


def running(name: str, now: float, ran: float, ranks: int, ready: int | None = None) -> Training:
    size = WorldSize(min=max(1, ranks // 2), target=ranks, max=max(8, ranks))
    there = ranks if ready is None else ready
    rows = [
        RankStatus(rank=r, phase="Running", node=f"node-{r // 4}", started_at=now - ran, attempt=0)
        if r < there
        else RankStatus(rank=r, message="waits for a node with 8 H100")
        for r in range(ranks)
    ]
    status = Status(
        phase=Phase.READY if there >= size.min else Phase.PENDING,
        world=WorldStatus.of(there, size), ranks=rows, started_at=now - ran if there else None,
        world_size_history=[WorldPoint(at=now - ran, target=ranks, ready=there)],
    )  # fmt: skip
    return training(name, status, target=ranks, least=size.min, at=now - ran - 10)


def ended(name: str, now: float, ago: float, ran: float, ranks: int, phase: Phase) -> Training:
    size = WorldSize(min=max(1, ranks // 2), target=ranks, max=max(8, ranks))
    code = {Phase.SUCCEEDED: 0, Phase.FAILED: 1, Phase.CANCELLED: 143}[phase]
    reason = {0: "Completed", 1: "Error", 143: "Stopped"}[code]
    exits = [
        RankExit(rank=r, exit_code=code, termination_reason=reason, started_at=now - ago - ran,
                 ended_at=now - ago, collateral=code == 143)
        for r in range(ranks)
    ]  # fmt: skip
    status = Status(
        phase=phase, world=WorldStatus.of(0 if code else ranks, size), rank_exits=exits,
        root_cause=exits[0] if code == 1 else None, started_at=now - ago - ran, ended_at=now - ago,
    )  # fmt: skip
    return training(name, status, target=ranks, least=size.min, at=now - ago - ran - 10)


def curves(
    plane: CrowdedPlane, uid: str, ranks: int, start: float, end: float, last: float
) -> None:
    points, chance = 240, random.Random(uid)
    for rank in range(ranks):
        times = [start + (end - start) * n / points for n in range(points)]
        plane.report(
            uid,
            rank,
            {
                "loss": [
                    (t, n * 90, last + 3 / (1 + n / 14) + chance.gauss(0, 0.03))
                    for n, t in enumerate(times)
                ],
                "tokens": [(t, n * 90, 3.38e6 * n) for n, t in enumerate(times)],
                "machine/memory": [
                    (
                        t,
                        n * 90,
                        1.7e10
                        + (4e9 * math.log1p(max(0, n - 190)) / 4 if rank > 3 else 0)
                        + chance.gauss(0, 1e8),
                    )
                    for n, t in enumerate(times)
                ],
                "machine/cpu": [
                    (t, n * 90, (0.95 if rank < 4 or n < 190 else 0.6) + chance.gauss(0, 0.02))
                    for n, t in enumerate(times)
                ],
                "grad_norm": [(t, n * 90, 1.2 + chance.gauss(0, 0.1)) for n, t in enumerate(times)],
            },
        )


def rounds(plane: CrowdedPlane, uid: str, start: float, end: float) -> None:
    """Forty-four outer rounds, the last ones without all."""
    words = []
    for number in range(44):
        wanted = list(range(6 if number < 41 else 8))
        missing = {16: [3], 42: [6], 43: [5, 7]}.get(number, [])
        members = [rank for rank in wanted if rank not in missing]
        facts = RoundFacts(
            run="run", round=number, members=members, weights=[1.0] * len(members), missing=missing,
            late={8: [1], 28: [1]}.get(number, []), tokens=1.8e7 * (number + 1), steps=500,
            parameters=125_000_000, at=start + (end - start) * (number + 1) / 45,
        )  # fmt: skip
        for rank in members:
            blocked = 40.0 if number > 41 else 6.0
            cost = RoundCost(rank, 81_000_000, 81_000_000 * 2, 24, 120.0, blocked)
            words.append(ReportedRound(run="run", fragment=0, round=number, cost=cost, facts=facts))
    plane.metrics.rounds.add_reports(uid, words)


def fill(plane: CrowdedPlane) -> None:
    now = time.time()
    bad, events, attempts = failed(now)

    async def store_bad() -> None:
        stored = await plane.store.create(bad)
        await plane.store.update_status(stored, bad.status, events, attempts)

    plane.run(store_bad())
    plane.put(
        running("sweep-lr-07", now, 18_480, 4), running("sweep-lr-08", now, 18_420, 4),
        running("sweep-lr-09", now, 18_360, 4), running("vit-b16-imagenet", now, 2460, 6, 2),
        running("mixtral-probe", now, 720, 16, 0), running("tiny-gpt", now, 760, 4),
        running("embeddings-xl", now, 32_100, 96, 81), large(1000, name="llama-1b-diloco"),
        ended("tiny-gpt-baseline", now, 6100, 2282, 4, Phase.SUCCEEDED),
        ended("whisper-ft-de", now, 9000, 11_640, 8, Phase.SUCCEEDED),
        ended("sweep-lr-06", now, 8200, 1270, 4, Phase.CANCELLED),
        ended("mnist-smoke", now, 90_000, 3.1, 2, Phase.FAILED),
    )  # fmt: skip
    curves(plane, bad.uid, 8, now - 6720, now - 720, 3.05)
    for at, name in enumerate(("sweep-lr-07", "sweep-lr-08", "sweep-lr-09", "tiny-gpt")):
        curves(
            plane, f"uid-{name}", 4, now - 18_000 / (1 + 20 * (at == 3)), now - 5, 3.41 - at / 12
        )
    for name, last in (("tiny-gpt-baseline", 2.98), ("whisper-ft-de", 0.19), ("sweep-lr-06", 7.9)):
        curves(plane, f"uid-{name}", 2, now - 9000, now - 6100, last)
    losing(plane, "uid-llama-1b-diloco", 200, 40)
    rounds(plane, bad.uid, now - 6720, now - 720)
    cause = now - 720
    lines = [LogLine(rank=5, text="step 22029 loss 3.049 tok/s 17.9k", time=cause - 14)]
    assert bad.status.root_cause is not None
    for at, text in enumerate(bad.status.root_cause.log_tail):
        lines.append(LogLine(rank=6, text=text, time=cause - 8 + 2 * at))
    lines.append(
        LogLine(rank=7, text="MemoryError: cannot allocate 1.07 GiB for shard 0413", time=cause + 4)
    )
    plane.executor.lines[FAILED] = lines


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    with crowded_plane() as plane, open_browser() as browser:
        fill(plane)
        plane.start()
        for name, path, wanted, width, height, theme in SHOTS:
            scale = 2 if width < 500 else 1
            context = browser.new_context(
                viewport={"width": width, "height": height}, device_scale_factor=scale,
                color_scheme=theme, reduced_motion="reduce",
            )  # fmt: skip
            page = context.new_page()
            page.goto(plane.link())
            page.wait_for_selector(".chips button")
            page.goto(plane.origin + path)
            page.wait_for_selector(wanted)
            page.wait_for_timeout(1500)
            shot = context.new_cdp_session(page).send(
                "Page.captureScreenshot", {"format": "webp", "quality": QUALITY}
            )
            (IMAGES / f"{name}.webp").write_bytes(base64.b64decode(shot["data"]))
            context.close()
    total = sum(image.stat().st_size for image in IMAGES.glob("*.webp"))
    assert total < MAX_BYTES, f"{total} bytes"


if __name__ == "__main__":
    main()
