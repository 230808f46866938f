"""A supervisor that cannot live fails the training, in its own words."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.support.in_process import plane

from atoll.backends.local import supervisor_client
from atoll.core.phase import Phase
from atoll.core.spec import WorldSize


def test_a_supervisor_that_keeps_dying_fails_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if atoll had been replaced under a running control plane by one that does not fit.
    monkeypatch.setattr(
        supervisor_client, "SUPERVISOR_CODE", "raise SystemExit('this atoll does not fit')"
    )

    async def check() -> None:
        async with plane(tmp_path) as control:
            world = WorldSize(min=1, target=1, max=1)
            made = await control.create(name="a", command=["true"], world_size=world)
            ended = await control.until(made, lambda t: t.status.phase.is_terminal)
            assert ended.status.phase is Phase.FAILED
            assert "this atoll does not fit" in ended.status.message

    asyncio.run(check())
