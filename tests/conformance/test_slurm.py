"""The one fault table, under a real Slurm."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import pytest
from tests.conformance.slurm_backend import SlurmBackend, put_squeue
from tests.conformance.table import ROWS, Row
from tests.conformance.test_table import quick_rows, run
from tests.support.control_plane import serving
from tests.support.slurm_cluster import needs_slurm, slurm_cluster

pytestmark = [needs_slurm, pytest.mark.slurm]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmBackend]:
    folder = tmp_path_factory.mktemp("slurm-rows")
    (folder / "scratch").mkdir()
    with slurm_cluster(folder / "cluster") as cluster:
        path = f"{put_squeue(cluster)}:{os.environ['PATH']}"
        options = {"folder": f"{cluster.dir}/trainings", "heartbeat_timeout_s": 10.0}
        executor = json.dumps(["slurm", options])
        env = {"SLURM_CONF": str(cluster.conf), "PATH": path, "ATOLL_TEST_EXECUTOR": executor}
        with serving(folder / "state", env=env) as plane:
            backend = SlurmBackend(plane, folder / "scratch", cluster)
            yield backend
            backend.close()


# Where exactly our own controller is killed is the same on every backend: all of these rows run on
# `local` each time, one of them here, and all of them here in `make soak`.
ONE_OF_THEM = "controller killed after apply 1"
QUICK = frozenset(
    row.name for row in ROWS if "controller killed" not in row.name or row.name == ONE_OF_THEM
)


@pytest.mark.parametrize("row", quick_rows(QUICK))
def test_slurm(slurm: SlurmBackend, row: Row) -> None:
    run(slurm, row)
