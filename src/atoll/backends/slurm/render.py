"""The batch script of an attempt. Pure; `atoll run --dry-run` prints it."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence

from atoll.backends.base import LOG_FILE, LOGS, RECORDS, WRAPPER
from atoll.backends.slurm.options import NAMED, SlurmOptions
from atoll.core.spec import TrainingSpec
from atoll.core.status import Training
from atoll.core.text import parse_quantity

# The control plane's own secrets and addresses are not passed on to ranks.
WITHHELD = ("ATOLL_CONFIG", "ATOLL_TOKEN", "ATOLL_URL", "ATOLL_STATE_DIR")
# Variables of sbatch that would change which job is which rank's, or keep sbatch waiting.
OVERRULING = ("CLUSTERS", "ERROR", "INPUT", "OPEN_MODE", "REQUEUE", "TEST_ONLY", "WAIT")
# Variables of sbatch that are not called as their option is.
NAMES = {
    "array": ("ARRAY_INX",),
    "cpus-per-task": ("CPUS_PER_GPU",),
    "gres": ("GPUS", "GPUS_PER_NODE", "GPUS_PER_SOCKET", "GPUS_PER_TASK"),
    "mem": ("MEM_PER_CPU", "MEM_PER_GPU", "MEM_PER_NODE"),
    "mem-per-cpu": ("MEM_PER_GPU", "MEM_PER_NODE"),
    "time": ("TIMELIMIT",),
}
SHORT = {"A": "account", "C": "constraint", "p": "partition", "q": "qos", "t": "time"}
_JOB = re.compile(r"atoll-(?P<uid>[0-9A-Za-z]+)-(?P<attempt>\d+)-(?P<offset>\d+)")


def job_name(uid: str, attempt: int, offset: int) -> str:
    return f"atoll-{uid}-{attempt}-{offset}"


def read_job_name(name: str) -> tuple[str, int, int] | None:
    """(uid, attempt, the rank of task 0) of a job of ours; None of another."""
    match = _JOB.fullmatch(name)
    return None if match is None else (match["uid"], int(match["attempt"]), int(match["offset"]))


def chunks(ranks: Iterable[int], size: int) -> dict[int, list[int]]:
    """The ranks by array, as task numbers: an array has the tasks 0 to `size` - 1."""
    arrays: dict[int, list[int]] = {}
    for rank in sorted(ranks):
        arrays.setdefault(rank - rank % size, []).append(rank % size)
    return arrays


def task_spans(tasks: Sequence[int]) -> str:
    """`0-2,5`, as sbatch and scancel take it."""
    spans: list[list[int]] = []
    for task in sorted(tasks):
        if spans and task == spans[-1][1] + 1:
            spans[-1][1] = task
        else:
            spans.append([task, task])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def render_script(
    training: Training,
    options: SlurmOptions,
    folder: str,
    python: str,
    attempt: int,
    offset: int,
    tasks: Sequence[int],
) -> str:
    """One array for these ranks, each a task with the wrapper in it."""
    spec = training.spec
    lines = [
        f"--job-name={job_name(training.uid, attempt, offset)}",
        f"--array={task_spans(tasks)}",
        "--no-requeue",
        "--nodes=1",
        "--ntasks=1",
        "--output=/dev/null",
        *_resources(spec, options),
        *(
            f"--{field}={value}"
            for field in NAMED
            if field != "gres" and (value := getattr(options, field)) is not None
        ),
        *options.sbatch,
    ]
    quoted = re.sub(r'([\\$"`])', r"\\\1", folder)  # as it stands between double quotes
    log = f"{quoted}/{LOGS}/$rank"
    wrapper = [python, "-S", "-I", f"{folder}/{WRAPPER}", f"{folder}/{RECORDS}"]
    return "\n".join(
        [
            "#!/bin/bash -l" if options.prologue else "#!/bin/bash",
            *(f"#SBATCH {line}" for line in lines),
            f"rank=$((SLURM_ARRAY_TASK_ID + {offset}))",
            f'mkdir -p "{log}" || exit 73',
            f'exec >> "{log}/{LOG_FILE}" 2>&1',
            *(["set -e", *options.prologue, "set +e"] if options.prologue else []),
            f'exec {shlex.join(wrapper)} "$rank" {attempt} --host "$SLURMD_NODENAME"',
            "",
        ]
    )


def _resources(spec: TrainingSpec, options: SlurmOptions) -> list[str]:
    resources, lines = spec.resources, []
    if resources.cpu is not None:
        lines.append(f"--cpus-per-task={max(math.ceil(parse_quantity(resources.cpu)), 1)}")
    if resources.memory is not None:
        lines.append(f"--mem={max(math.ceil(parse_quantity(resources.memory) / 2**20), 1)}M")
    gres = [options.gres] if options.gres else []
    if resources.gpu_count:
        model = resources.gpu_models[0] if resources.gpu_models else ""
        kind = f":{options.gpu_types.get(model, model.lower())}" if model else ""
        gres.append(f"gpu{kind}:{resources.gpu_count}")
    return [*lines, *([f"--gres={','.join(gres)}"] if gres else [])]


def command_env(environ: Mapping[str, str], script: str) -> dict[str, str]:
    """The variables for a command of Slurm, `script` being what sbatch is given.

    For sbatch, variables of the user's shell win over the lines of a script. Those that would
    overrule one of its lines are left out, and the others (SBATCH_ACCOUNT) are kept as defaults.
    """
    names = {*OVERRULING}
    for line in re.findall(r"^#SBATCH --?([\w-]+)", script, re.MULTILINE):
        option = SHORT.get(line, line)
        names |= {*NAMES.get(option, ()), option.upper().replace("-", "_")}
    doomed = {*WITHHELD, *(f"SBATCH_{name}" for name in names)}
    others = ("SQUEUE_", "SCANCEL_")
    return {n: v for n, v in environ.items() if n not in doomed and not n.startswith(others)}


def render_command(
    spec: TrainingSpec,
    options: SlurmOptions,
    folder: str,
    command: Sequence[str],
    workdir: str | None = None,
) -> list[str]:
    """The command of a rank, in its container if it has one. The wrapper stays outside."""
    if options.container is None or spec.image is None:
        return list(command)
    mounts = [f"{folder}:{folder}", *options.container_mounts]
    if options.container == "pyxis":
        inside = [f"--container-workdir={workdir}"] if workdir else []
        srun = ["srun", "--ntasks=1", "--export=ALL", f"--container-image={spec.image}"]
        return [*srun, f"--container-mounts={','.join(mounts)}", *inside, *command]
    binds = [part for mount in mounts for part in ("--bind", mount)]
    gpus = ["--nv"] if spec.resources.gpu_count else []
    inside = ["--pwd", workdir] if workdir else []
    return ["apptainer", "exec", *gpus, *binds, *inside, spec.image, *command]
