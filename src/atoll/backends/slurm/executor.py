"""The executor of Slurm: one array for the ranks of an attempt, never requeued.

Slurm's three commands are all it needs: neither accounting nor slurmrestd. It runs as a normal user
where these commands work, such as a login node, with a folder that all hosts see.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from atoll.agent.wrapper import code_root
from atoll.backends.base import FolderBackend
from atoll.backends.launch import RankLayout
from atoll.backends.records import AttemptKey, JobState, Timing, best_jobs
from atoll.backends.service import run_command
from atoll.backends.slurm.options import SlurmOptions
from atoll.backends.slurm.read import SQUEUE, QueuedTask, read_queue
from atoll.backends.slurm.render import (
    chunks,
    command_env,
    render_command,
    render_script,
    task_spans,
)
from atoll.core.errors import Permanent, Temporary, ValidationError
from atoll.core.executors import PlaneContext
from atoll.core.spec import TrainingSpec
from atoll.core.status import Training

COMMANDS = ("sbatch", "squeue", "scancel")
NOT_FOUND = (
    "not found: run this where Slurm's commands are, such as a login node, or install them "
    "(Debian: apt-get install slurm-client)"
)
# What sbatch says of requests that may pass later, and of those that it will refuse at any time;
# everything else may pass, too.
PASSING = re.compile(
    r"(?i)unable to contact|timed out|temporarily|zero bytes|try again|unexpected message|"
    r"accounting/qos policy|communication|maxsubmit"
)
REFUSALS = re.compile(
    r"(?i)not available|invalid|can ?not be satisfied|unrecognized option|not permitted|"
    r"access denied|too long|must be|permission denied|violates? .*limit|unable to open file"
)
# What sbatch says of an option that this cluster does not have, by the option.
NEVER = {
    **{f"invalid {name}": name for name in ("partition", "account", "qos")},
    "invalid feature": "constraint",
    "reservation is invalid": "reservation",
    "invalid generic resource": "gres",
    "unrecognized option|invalid option": "sbatch",
}
TRY_S = 3.0  # how long a refusal is waited for
SHARED_S = 0.2  # observations this close together share a question


class SlurmBackend(FolderBackend):
    """The Executor of Slurm. Options are those of `SlurmOptions`."""

    name = "slurm"
    options_type = SlurmOptions
    job_variable = "SLURM_JOB_ID"
    eviction_s = 30.0  # KillWait by default, where Slurm does not say
    options: SlurmOptions

    def __init__(self, options: SlurmOptions, root: Path) -> None:
        super().__init__(options, root)
        self.python = options.python or sys.executable
        self._conf = os.path.expanduser(options.conf or os.environ.get("SLURM_CONF", ""))
        self.timing = Timing(heartbeat_timeout_s=options.heartbeat_timeout_s)
        self.questions = 0  # asked of slurmctld so far
        self._queue: tuple[float, list[QueuedTask]] | None = None
        self._asking = asyncio.Lock()
        self._array_size: int | None = None  # until the cluster was asked

    def check_machine(self) -> None:
        for command in COMMANDS:
            if shutil.which(command) is None:
                raise Permanent(f"{command} {NOT_FOUND}")

    @classmethod
    def preview(cls, options: SlurmOptions, home: PlaneContext, training: Training) -> str:
        """What the first submit of this training would send. Slurm is not asked, nor needed."""
        executor = cls.from_options(options, home.state_dir)
        executor.check(training.spec)
        arrays = chunks(range(training.spec.world_size.target), options.array_size).items()
        return "\n".join(executor.script(training, 0, offset, tasks) for offset, tasks in arrays)

    async def probe(self) -> None:
        await self._ask_queue()

    async def dry_run(self, spec: TrainingSpec, namespace: str = "default") -> None:
        """By `sbatch --test-only`. Words that may be of the moment, such as nodes that are drained,
        are no refusal."""
        await asyncio.to_thread(self.check_folder)
        untried = Training(namespace="x", uid="0" * 32, spec=spec)
        try:
            async with asyncio.timeout(TRY_S):
                script = self.script(untried, 0, 0, [0])
                status, _, trouble = await self._run("sbatch", "--test-only", stdin=script)
        except (TimeoutError, Temporary, Permanent):
            return
        reason = _one_line(trouble.replace("allocation failure: ", ""))
        for pattern, field in NEVER.items():
            if status and re.search(pattern, reason, re.IGNORECASE):
                value, count = getattr(self.options, field), spec.resources.gpu_count
                if field == "gres" and count and value is None:
                    field, value = "gpu_count", count
                raise ValidationError(field, value, f"sbatch: {reason}")

    # The verbs

    async def start_jobs(self, training: Training, attempt: int, ranks: Sequence[int]) -> None:
        await self._ask_limits()
        for offset, tasks in chunks(ranks, self._array_size or self.options.array_size).items():
            script = self.script(training, attempt, offset, tasks)
            status, _, trouble = await self._run("sbatch", "--parsable", stdin=script)
            self._queue = None
            if status:
                raise _refusal(trouble)

    async def list_jobs(self, training: Training) -> Mapping[AttemptKey, JobState]:
        tasks = await self._ask_queue()
        return best_jobs((t.key, t.job) for t in tasks if t.uid == training.uid)

    async def stop_jobs(self, training: Training, attempts: Sequence[AttemptKey]) -> None:
        """By the job's id and name: ids are given out again when Slurm has lost its state."""
        doomed = set(attempts)
        arrays: dict[tuple[int, str], list[int]] = {}
        for task in await self._ask_queue():
            if task.uid == training.uid and task.key in doomed and task.job.is_active:
                arrays.setdefault((task.array, task.name), []).append(task.task)
        for (array, name), tasks in arrays.items():
            arguments = [f"--name={name}", f"{array}_[{task_spans(tasks)}]"]
            status, _, trouble = await self._run("scancel", "--quiet", *arguments)
            self._queue = None
            if status and "nvalid job id" not in trouble:
                raise Temporary(f"scancel: {_one_line(trouble)}")

    # What a rank runs

    def rank_layout(self, training: Training) -> RankLayout:
        is_own = self.options.container is None and self.python == sys.executable
        python = self.python if self.options.container is None else "python3"
        return self.layout_in(self.folder_of(training), python, has_atoll=is_own)

    def wrap_command(self, training: Training, command: list[str]) -> list[str]:
        spec, folder = training.spec, str(self.folder_of(training))
        root = spec.code and code_root(
            self.record_store_of(training), training.uid, spec.code.digest
        )
        return render_command(spec, self.options, folder, command, root or spec.working_dir)

    def script(self, training: Training, attempt: int, offset: int, tasks: Sequence[int]) -> str:
        folder = str(self.folder_of(training))
        return render_script(training, self.options, folder, self.python, attempt, offset, tasks)

    async def prepare(self, training: Training) -> None:
        await self._ask_limits()
        await super().prepare(training)

    # Slurm's commands

    async def _ask_queue(self) -> list[QueuedTask]:
        """One question for all trainings; observations that come together share the answer."""
        async with self._asking:
            if self._queue is not None and time.monotonic() < self._queue[0] + SHARED_S:
                return self._queue[1]
            self._queue = None
            queried_at = time.monotonic()
            self.questions += 1
            tasks = read_queue(*await self._run(*SQUEUE))
            # A long queue is asked for less often: at most a fifth of the time.
            took_s = time.monotonic() - queried_at
            self.timing = self.timing._replace(observe_s=max(0.5, 4 * took_s))
            self._queue = (queried_at, tasks)
            return tasks

    async def _ask_limits(self) -> None:
        """The cluster's own grace, and how many tasks its arrays may have; asked once."""
        if self._array_size is not None:
            return
        _, out, _ = await self._run("scontrol", "show", "config")
        limits = dict(re.findall(r"^(KillWait|MaxArraySize)\s*=\s*(\d+)", out, re.MULTILINE))
        if len(limits) == 2:
            self.eviction_s = float(limits["KillWait"])
            most = max(int(limits["MaxArraySize"]), 1)  # task numbers are below it
            self._array_size = min(self.options.array_size, most)

    async def _run(self, *arguments: str, stdin: str | None = None) -> tuple[int, str, str]:
        env = command_env(os.environ, stdin or "")
        if self._conf:
            env["SLURM_CONF"] = self._conf
        try:
            return await run_command(*arguments, env=env, stdin=stdin)
        except FileNotFoundError:
            raise Permanent(f"{arguments[0]} {NOT_FOUND}") from None


def _refusal(trouble: str) -> Permanent | Temporary:
    reason = f"sbatch: {_one_line(trouble)}"
    if REFUSALS.search(trouble) and not PASSING.search(trouble):
        return Permanent(reason)
    return Temporary(reason, retry_after_s=2.0)


def _one_line(trouble: str) -> str:
    lines = [re.sub(r"^s\w+: (error: )?", "", line) for line in trouble.splitlines()]
    return "; ".join(line for line in lines if line.strip()) or "no reason given"
