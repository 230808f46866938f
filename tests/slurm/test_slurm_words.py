"""Where Slurm's own word is false or missing, each provoked with the real daemons."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atoll.backends.slurm import executor as slurm
from atoll.core.errors import Permanent, Temporary, ValidationError
from atoll.core.spec import Resources
from atoll.core.status import Training
from tests.slurm.conftest import Lab
from tests.support.slurm_cluster import SlurmCluster, needs_slurm, wait_until

pytestmark = [needs_slurm, pytest.mark.slurm]

LOOP = "echo $RANK $ATOLL_ATTEMPT >> {folder}/ran; while [ ! -e {folder}/go ]; do sleep 0.05; done"
Play = Callable[..., None]


def is_alive(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


async def look_until_it_fails(lab: Lab, training: Training) -> None:
    """The last answer may be shared for a moment."""
    while True:
        await lab.executor.observe(training)


def codes(training: Training) -> list[int | None]:
    return [ended.exit_code for ended in training.status.rank_exits]


def reasons(training: Training) -> list[str]:
    return [ended.termination_reason for ended in training.status.rank_exits]


def test_a_gang_runs_grows_shrinks_and_is_asked_for_in_one_question(lab: Play) -> None:
    async def body(lab: Lab) -> None:
        training = await lab.create(lab.spec(LOOP, 2, min=1))
        await lab.until_running(training, 2)
        await lab.ask(training, target=4)
        await lab.until_running(training, 4)
        await lab.ask(training, target=2)
        await lab.until(training, lambda t: len(t.status.removed_ranks) == 2)
        executor, before = lab.executor, lab.executor.questions
        await asyncio.sleep(0.3)  # an answer may be shared no longer
        looks = [executor.observe(await lab.get(training)) for _ in range(5)]
        await asyncio.gather(*looks)
        assert executor.questions <= before + 2  # one of these looks, and one of the controller
        (lab.folder / "go").touch()
        over = await lab.until_over(training)
        assert (over.status.phase, codes(over)) == ("succeeded", [0, 0, 143, 143])
        assert lab.ran() == ["0 0", "1 0", "2 0", "3 0"]
        lines = [line async for line in executor.logs(over)]
        assert lines == []

    lab(body)


def test_a_daemon_that_was_killed_runs_nothing_twice_and_loses_no_exit(lab: Play) -> None:
    """1: it forgets jobs that it had taken, and starts others again."""

    async def body(lab: Lab) -> None:
        training = await lab.create(lab.spec(LOOP + "; exit 5", 3, min=1, max_restarts=0))
        await lab.until_running(training, 3)
        lab.cluster.restart_controller()
        (lab.folder / "go").touch()
        over = await lab.until_over(training)
        assert lab.ran() == ["0 0", "1 0", "2 0"]
        assert len(over.status.rank_exits) == 3
        # A rank that Slurm itself ended as an orphan is told as that; all others exited 5.
        for ended in over.status.rank_exits:
            assert ended.exit_code == 5 or ended.signal or ended.exit_code is None, ended

    lab(body)


def test_an_empty_answer_with_errors_is_not_an_empty_queue(lab: Play) -> None:
    """2: with slurmctld down, squeue ends well and has no jobs."""

    async def body(lab: Lab) -> None:
        training = await lab.create(lab.spec(LOOP, 2))
        running = await lab.until_running(training, 2)
        lab.cluster.kill("slurmctld")
        try:
            with pytest.raises(Temporary, match="squeue does not answer"):
                await look_until_it_fails(lab, running)
            assert [r.phase for r in (await lab.get(training)).status.ranks] == ["Running"] * 2
        finally:
            lab.cluster.restart_controller()
        (lab.folder / "go").touch()
        over = await lab.until_over(training)
        assert lab.ran() == ["0 0", "1 0"]
        assert len(over.status.rank_exits) == 2

    lab(body)


def test_a_host_without_the_python_is_told_and_no_code_invented(lab: Play) -> None:
    """4: the exit status of a job that could not start is not a rank's."""

    async def body(lab: Lab) -> None:
        over = await lab.until_over(await lab.create(lab.spec("true", 1)))
        assert (over.status.phase, codes(over), reasons(over)) == ("failed", [None], ["Rejected"])
        assert "Slurm: FAILED" in over.status.rank_exits[0].message

    lab(body, python="/nonesuch/python")


def test_a_rank_that_exits_itself_keeps_its_code_when_a_child_ran_out_of_memory(lab: Play) -> None:
    """6: then the whole job is called OUT_OF_MEMORY, with a code of its own."""

    async def body(lab: Lab) -> None:
        if not lab.cluster.has_cgroups:
            pytest.skip("this machine has no writable memory control group")
        script = "tail /dev/zero; sleep 0.2; exit 5"
        spec = lab.spec(script, 1, resources=Resources(memory="64Mi"))
        over = await lab.until_over(await lab.create(spec))
        assert (codes(over), reasons(over)) == ([5], ["Error"])

    lab(body)


def test_a_stop_waits_for_the_trainings_grace_and_not_for_slurms(lab: Play) -> None:
    """9: KillWait is cluster-wide, 3 s here; the rank needs longer to save."""

    async def body(lab: Lab) -> None:
        script = (
            "trap 'sleep 5; touch {folder}/saved; exit 0' TERM; touch {folder}/up; "
            "while :; do sleep 0.05; done"
        )
        training = await lab.create(lab.spec(script, 1, stop_grace_s=30.0))
        await lab.until(training, lambda t: (lab.folder / "up").exists())
        await lab.ask(training, cancel=True)
        over = await lab.until_over(training)
        assert (over.status.phase, codes(over)) == ("cancelled", [0])
        assert (lab.folder / "saved").exists()

    lab(body)


def test_a_time_limit_is_told_by_its_name(lab: Play) -> None:
    """12: the limit itself is late by up to a minute; its name is right."""

    async def body(lab: Lab) -> None:
        training = await lab.create(lab.spec(LOOP, 1))
        await lab.until_running(training, 1)
        (job,) = [j for j in lab.cluster.jobs() if training.uid in j["name"]]
        moved = lab.cluster.run("scontrol", "update", f"jobid={job['job_id']}", "endtime=now")
        if moved.returncode:
            pytest.skip(f"the end of a job cannot be moved here: {moved.stderr}")
        over = await lab.until_over(training, within_s=110)
        assert reasons(over) == ["TimeLimit"]
        assert codes(over) == [143]

    lab(body)


def test_what_a_rank_left_behind_is_ended_with_it(lab: Play) -> None:
    """14."""

    async def body(lab: Lab) -> None:
        script = "setsid sleep 300 & echo $! > {folder}/child; exit 0"
        over = await lab.until_over(await lab.create(lab.spec(script, 1)))
        assert codes(over) == [0]
        child = int((lab.folder / "child").read_text())
        await asyncio.to_thread(wait_until, lambda: not is_alive(child), "end of the child")

    lab(body)


def test_slurmd_restarted_under_its_ranks_loses_nothing(lab: Play) -> None:
    """11: ranks live, and so does the record."""

    async def body(lab: Lab) -> None:
        training = await lab.create(lab.spec(LOOP + "; exit 6", 1))
        await lab.until_running(training, 1)
        (job,) = [j for j in lab.cluster.jobs() if training.uid in j["name"]]
        lab.cluster.kill(job["nodes"])
        (lab.folder / "go").touch()
        over = await lab.until_over(training)
        assert codes(over) == [6]
        lab.cluster.start_node(job["nodes"])

    lab(body)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"partition": "nonesuch"}, "partition"),
        ({"gres": "gpu:8"}, "generic resource"),
        ({"sbatch": ["--mem=900G"]}, "not available|Memory"),
    ],
)
def test_what_slurm_refuses_ends_the_training_with_its_words(
    lab: Play, options: dict[str, Any], words: str
) -> None:
    async def body(lab: Lab) -> None:
        over = await lab.until_over(await lab.create(lab.spec("true", 1)))
        assert (over.status.phase, over.status.reason) == ("failed", "ExecutorRefused")
        assert re.search(words, over.status.message, re.IGNORECASE), over.status.message
        assert over.status.rank_exits == []

    lab(body, **options)


def test_without_the_commands_it_is_one_line(lab: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(lab: Lab) -> None:
        monkeypatch.setenv("PATH", "/nonesuch")
        with pytest.raises(Permanent, match=r"^squeue not found: run this where Slurm's commands"):
            await lab.executor.probe()
        monkeypatch.undo()

    lab(body)


def test_ranks_in_two_arrays_are_one_gang(lab: Play) -> None:
    async def body(lab: Lab) -> None:
        training = await lab.create(lab.spec("echo rank $RANK of $WORLD_SIZE; exit 0", 5))
        over = await lab.until_over(training)
        assert codes(over) == [0] * 5
        lines = {line.rank: line.text async for line in lab.executor.logs(over)}
        assert lines == {rank: f"rank {rank} of 5" for rank in range(5)}

    lab(body, array_size=2)


def test_a_cancelled_job_is_told_as_that(lab: Play) -> None:
    async def body(lab: Lab) -> None:
        training = await lab.create(lab.spec(LOOP, 2))
        await lab.until_running(training, 2)
        (job, *_) = [j for j in lab.cluster.jobs() if training.uid in j["name"]]
        assert lab.cluster.run("scancel", str(job["array_job_id"])).returncode == 0
        over = await lab.until_over(training)
        assert set(reasons(over)) <= {"Deleted", "Stopped"}
        assert "Deleted" in reasons(over)
        assert codes(over) == [143, 143]

    lab(body)


def test_a_rank_that_is_frozen_is_noticed(lab: Play) -> None:
    """10: Slurm does not."""

    async def body(lab: Lab) -> None:
        training = await lab.create(lab.spec(LOOP, 1))
        await lab.until_running(training, 1)
        pid = json.loads(lab.record(training, "0.0.start").read_text())["pid"]
        os.kill(pid, signal.SIGSTOP)
        over = await lab.until_over(training)
        assert (codes(over), reasons(over)) == ([137], ["Frozen"])

    lab(body)


def test_what_the_user_s_shell_sets_for_slurm_changes_nothing_of_ours(
    lab: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(lab: Lab) -> None:
        training = await lab.create(lab.spec(LOOP, 2))
        await lab.until_running(training, 2)
        jobs = [job for job in lab.cluster.jobs() if training.uid in job["name"]]
        assert {job["partition"] for job in jobs} == {"main"}
        await lab.ask(training, cancel=True)
        over = await lab.until_over(training)
        assert over.status.phase == "cancelled"

    for name, value in (
        ("SBATCH_PARTITION", "high"),
        ("SBATCH_JOB_NAME", "mine"),
        ("SBATCH_ARRAY_INX", "0-8"),
        ("SBATCH_WAIT", "1"),
        ("SCANCEL_INTERACTIVE", "1"),
    ):
        monkeypatch.setenv(name, value)
    lab(body, partition="main")


def test_what_was_printed_before_a_rank_could_start_is_with_the_root_cause(lab: Play) -> None:
    async def body(lab: Lab) -> None:
        training = await lab.create(lab.spec("true", 1))
        over = await lab.until_over(training)
        assert over.status.phase == "failed"
        assert over.status.root_cause is not None
        assert over.status.root_cause.log_tail == ["no such module"]

    lab(body, prologue=["echo no such module >&2", "false"])


def test_options_that_the_cluster_does_not_have_are_told_before_anything_is_made(
    cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = {}
    for option, value in (
        ("constraint", "zz"),
        ("gres", "gpu:2"),
        ("reservation", "course"),
        ("sbatch", ["--nonesuch=1"]),
        ("time", "1:00:00"),
    ):
        lab = Lab(cluster, tmp_path, **{option: value})
        try:
            asyncio.run(lab.executor.dry_run(lab.spec("true")))
        except ValidationError as error:
            refused[option] = (error.field, error.expected.split(":")[0])
    assert refused == {
        name: (name, "sbatch") for name in ("constraint", "gres", "reservation", "sbatch")
    }
    lab = Lab(cluster, tmp_path)
    with pytest.raises(ValidationError, match="gpu_count: 2"):
        asyncio.run(lab.executor.dry_run(lab.spec("true", resources=Resources(gpu_count=2))))
    lab = Lab(cluster, cluster.conf)  # a file is no folder
    with pytest.raises(ValidationError, match="folder: .* expected a folder that this user can"):
        asyncio.run(lab.executor.dry_run(lab.spec("true")))
    # Nodes that are away come back: that is no refusal, and neither is a Slurm that is silent.
    lab = Lab(cluster, tmp_path)
    try:
        for node in cluster.nodes:
            cluster.run("scontrol", "update", f"nodename={node}", "state=drain", "reason=x")
        asyncio.run(lab.executor.dry_run(lab.spec("true")))
    finally:
        cluster.resume_nodes()
    monkeypatch.setattr(slurm, "TRY_S", 1.0)
    lab = Lab(cluster, tmp_path, conf="/nonesuch/slurm.conf", partition="nope")
    asyncio.run(lab.executor.dry_run(lab.spec("true")))
    assert list(tmp_path.iterdir()) == []
