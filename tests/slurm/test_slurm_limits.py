"""Where the cluster's own limits are narrow, with the real daemons."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.slurm.conftest import Lab
from tests.support.slurm_cluster import needs_slurm, slurm_cluster

pytestmark = [needs_slurm, pytest.mark.slurm]


def test_more_ranks_than_an_array_may_have_are_several_arrays(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    async def body(lab: Lab) -> None:
        training = await lab.create(lab.spec("exit 0", ranks=5))
        over = await lab.until_over(training)
        assert over.status.phase == "succeeded", over.status
        names = {job["name"] for job in lab.cluster.jobs() if training.uid in job["name"]}
        assert names == {f"atoll-{training.uid}-0-{first}" for first in (0, 2, 4)}

    short = tmp_path_factory.mktemp("slurm")  # sockets are in it, whose paths have a limit
    with slurm_cluster(short / "cluster", max_array=2) as cluster:
        asyncio.run(Lab(cluster, tmp_path).play(body))
