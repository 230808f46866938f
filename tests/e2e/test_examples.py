"""Every file in examples/, run as its own first lines say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
PY = sys.executable
RUN = [PY, "-m", "atoll.cli", "run"]

# File, the command that runs it, what it must print.
TABLE: list[tuple[str, list[str], list[str]]] = [
    (
        "quickstart.py",
        [PY],
        [
            "WorldStatus(ready=6, target=6, min=2, max=6, below_minimum=False)",
            "rank 5: step 19",
        ],
    ),
    (
        "elastic.py",
        [PY],
        [
            "RankRestarting      rank 1: exit_code=137 reason=Signal signal=SIGKILL",
            "Scaled              target 2 -> 4",
            "of 60 items",
        ],
    ),
    ("optuna_sweep.py", ["env", "ROUNDS=1", PY], ["best of 4: 0."]),
    (
        "torch_distributed.py",
        [*RUN, "-n", "2", "--", PY],
        [f"[{rank}] rank {rank} of 2: the sum of all ranks is 1" for rank in range(2)],
    ),
    (
        "diloco_minimal.py",
        [*RUN, "-n", "2", "--", PY],
        [f"[{rank}] rank {rank}: loss" for rank in range(2)],
    ),
    (
        "diloco_gpt.py",
        [*RUN, "-n", "2", "-e", "ROUNDS=2", "--", PY],
        ["[0] round 1 members [0, 1]", "[1] round 1 members [0, 1]", "validation loss"],
    ),
    ("convert_before.py", [PY], ["step 120 rate 0.000000"]),
    (
        "convert_after.py",
        [*RUN, "-n", "2", "--", PY],
        [f"[{rank}] step 120 rate 0.000000" for rank in range(2)],
    ),
    (
        "21_torchrun_elastic.py",
        [PY],
        [
            "world 2: rank 0 continues from step 0",
            "two train; scaling to three",
            "WorldStatus(ready=3, target=3, min=2, max=3, below_minimum=False)",
            *(f"world 3: rank {rank} is done" for rank in range(3)),
        ],
    ),
    (
        "22_link_bench.py",
        [PY],
        [
            "WorldStatus(ready=2, target=2, min=2, max=2, below_minimum=False)",
            "Gbit/s (median)",
            "latency with 1 MiB",
        ],
    ),
    # A real API server takes it in tests/e2e/kubernetes/test_kube_eks.py.
    (
        "eks_irsa_s3.py",
        [PY],
        [
            '"serviceAccountName": "trainer"',
            '"value": "s3://my-bucket/tiny-gpt-1"',
            "p4de.24xlarge",
        ],
    ),
    (
        "demo.py",
        [PY],
        ["it is started again", "rank 1 is back", "scaled to 3", "the same on every rank"],
    ),
]
# With packages that only tests/integrations have, or a test of their own: those run them.
ELSEWHERE = {
    "diloco_accelerate.py",
    "modal_diloco.py",
    "sagemaker_diloco.py",
    "slurm_diloco.py",
    "weights_rl.py",
}
ARGUMENTS = {"demo.py": ["2", "3"], "eks_irsa_s3.py": ["--dry-run"]}


@pytest.mark.timeout(400)  # each loads torch several times over, which a busy machine drags out
@pytest.mark.parametrize(("name", "command", "told"), TABLE, ids=[row[0] for row in TABLE])
def test_example(atoll: Any, name: str, command: list[str], told: list[str]) -> None:
    done = subprocess.run(
        [*command, str(EXAMPLES / name), *ARGUMENTS.get(name, [])],
        cwd=atoll.cwd,
        env=atoll.env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for line in told:
        assert line in done.stdout


def test_every_example_is_in_the_table() -> None:
    names = {path.name for path in EXAMPLES.glob("*.py")}
    assert names == {row[0] for row in TABLE} | ELSEWHERE
