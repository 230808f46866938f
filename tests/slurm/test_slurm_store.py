"""Records in an S3 API under a real Slurm: hosts that see no folder together keep them there."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from atoll.agent.records import name_of
from atoll.backends.base import RECORDS, WRAPPER
from atoll.backends.reader import RecordReader
from atoll.backends.slurm.executor import SlurmBackend
from atoll.backends.slurm.options import SlurmOptions
from atoll.core.status import Training
from atoll.objectstore.bucket import Bucket
from tests.allreduce.s3server import S3Server
from tests.slurm.conftest import Lab
from tests.support.slurm_cluster import SlurmCluster, needs_slurm

pytestmark = [needs_slurm, pytest.mark.slurm, pytest.mark.timeout(400)]
PATIENCE_S = 120.0  # a store of the tests takes its time on a busy machine


class StoreArrays(SlurmBackend):
    """Jobs run the wrapper of the installed atoll, with the URI in place of a folder."""

    def uri(self, training: Training) -> str:
        return f"s3://runs/{training.uid}"

    def record_store_of(self, training: Training) -> Bucket:  # type: ignore[override]
        record_store = Bucket.open(self.uri(training))
        record_store.poll_s = record_store.heartbeat_s = 0.5
        return record_store

    def launch(self, training: Training) -> dict[str, object]:
        return {**super().launch(training), "poll_s": 0.2, "heartbeat_s": 0.5}

    def script(self, training: Training, attempt: int, offset: int, tasks: Sequence[int]) -> str:
        text, folder = super().script(training, attempt, offset, tasks), self.folder_of(training)
        beside = f"-S -I {folder}/{WRAPPER} {folder}/{RECORDS}"
        assert beside in text
        return text.replace(beside, f"-m atoll.agent.wrapper {self.uri(training)}")


def test_claims_and_ends_are_in_the_store(
    cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    aws = S3Server()
    aws.make_bucket("runs")
    for name, value in aws.environment.items():
        monkeypatch.setenv(name, value)
    made = Lab(cluster, tmp_path)
    options = SlurmOptions(conf=str(cluster.conf), sbatch=["--mem=500M"])
    made.executor = executor = StoreArrays(options, tmp_path / "trainings")

    async def body(lab: Lab) -> None:
        script = 'echo "$RANK.$ATOLL_ATTEMPT" >> {folder}/ran; until [ -e {folder}/go ]; do '
        script += "sleep 0.2; done; [ $RANK.$ATOLL_ATTEMPT != 1.0 ] || exit 7"
        training = await lab.create(lab.spec(script, max_restarts=1, min=1))
        await lab.until(training, lambda _: len(lab.ran()) == 3, PATIENCE_S)
        # A second start of what runs, as Slurm makes it after it was killed, finds the claim.
        await executor.start_jobs(training, 0, [0])
        reader = RecordReader(executor.record_store_of(training))
        await lab.until(training, lambda _: reader.refresh().ranks[2][0].start, PATIENCE_S)
        started = reader.refresh().ranks[2][0].start
        assert started is not None
        os.kill(started["pid"], signal.SIGSEGV)
        await lab.until(training, lambda _: "2.1" in lab.ran(), PATIENCE_S)
        (tmp_path / "go").touch()
        over = await lab.until_over(training, PATIENCE_S)
        assert over.status.phase == "succeeded", over.status
        assert [e.restart_count for e in over.status.rank_exits] == [0, 1, 1]
        assert [e.exit_code for e in over.status.rank_exits] == [0, 0, 0]
        assert lab.ran() == ["0.0", "1.0", "1.1", "2.0", "2.1"], "nothing ran twice"
        assert not (executor.folder_of(training) / RECORDS / name_of(0, 0, "claim")).exists()

    try:
        asyncio.run(made.play(body))
    finally:
        aws.stop()
