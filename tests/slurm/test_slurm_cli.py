"""As a user: `atoll.toml`, `atoll executors`, `atoll run --executor lab`, with the real daemons."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.backends.local.state import ENDPOINT
from tests.support.slurm_cluster import SlurmCluster, needs_slurm

pytestmark = [needs_slurm, pytest.mark.slurm]


class Shell:
    def __init__(self, cluster: SlurmCluster, folder: Path) -> None:
        self.folder = folder
        self.toml = folder / ".config" / "atoll" / "atoll.toml"
        self.toml.parent.mkdir(parents=True)
        self.toml.write_text(
            f'[executors.lab]\nkind = "slurm"\nfolder = "{folder}/shared"\n'
            f'conf = "{cluster.conf}"\nheartbeat_timeout_s = 10.0\n'
            'prologue = ["export LOADED=yes"]\n'
        )
        self.env = {**os.environ, "ATOLL_STATE_DIR": str(folder / "state"), "HOME": str(folder)}
        for name in ("ATOLL_URL", "ATOLL_TOKEN", "ATOLL_CONFIG", "SLURM_CONF", "XDG_CONFIG_HOME"):
            self.env.pop(name, None)

    def atoll(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "atoll.cli", *words],
            cwd=self.folder, env={**self.env, **env}, capture_output=True, text=True, timeout=100,
        )  # fmt: skip


@pytest.fixture
def shell(cluster: SlurmCluster, tmp_path: Path) -> Iterator[Shell]:
    made = Shell(cluster, tmp_path)
    yield made
    endpoint = tmp_path / "state" / ENDPOINT
    if endpoint.exists():  # a control plane was started by a command
        os.kill(json.loads(endpoint.read_text())["pid"], signal.SIGTERM)


def test_a_training_from_the_command_line(shell: Shell) -> None:
    listed = shell.atoll("executors")
    assert any(line.split()[:3] == ["lab", "slurm", "yes"] for line in listed.stdout.splitlines())
    script = "echo rank $RANK $LOADED; [ $RANK = 1 ] && exit 7; exit 0"
    done = shell.atoll(
        "run", "--executor", "lab", "--no-code", "-n", "2", "--min", "1", "--", "sh", "-c", script
    )
    assert done.returncode == 0, done
    assert "rank 0 yes" in done.stdout
    assert "rank 1 yes" in done.stdout


def test_a_project_of_many_files_reaches_the_ranks(shell: Shell) -> None:
    project = shell.folder / "project"
    (project / "model").mkdir(parents=True)
    (project / "model/net.py").write_text("WORD = 'of the project'")
    (project / "train.py").write_text("import model.net, os; print(model.net.WORD, os.getcwd())")
    words = ("run", "--executor", "lab", "-n", "2", "-C", str(project))
    done = shell.atoll(*words, "--", "python3", "train.py")
    assert done.returncode == 0, done
    assert f"[1] of the project {shell.folder}/shared/" in done.stdout
    assert "atoll: code: 2 files" in done.stderr
    done = shell.atoll(*words, "--no-code", "--", "python3", "train.py")
    assert done.returncode == 0, done
    assert f"[1] of the project {project}\n" in done.stdout


def test_a_failure_has_its_code_and_the_run_exits_1(shell: Shell) -> None:
    done = shell.atoll(
        "run", "--executor", "lab", "--no-code", "-n", "1", "--", "sh", "-c", "exit 7"
    )
    assert done.returncode == 1
    assert "code 7" in done.stdout + done.stderr


def test_a_dry_run_needs_no_slurm_and_starts_nothing(shell: Shell) -> None:
    done = shell.atoll(
        "run", "--executor", "lab", "--dry-run", "-n", "3", "--", "python", "t.py", PATH="/nonesuch"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "#SBATCH --array=0-2\n#SBATCH --no-requeue\n" in done.stdout
    assert not (shell.folder / "state").exists()


def test_without_slurm_it_is_one_line(shell: Shell) -> None:
    done = shell.atoll("run", "--executor", "lab", "-n", "1", "--", "true", PATH="/nonesuch")
    assert done.returncode != 0
    assert "sbatch not found" in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 2, done.stderr


def test_what_the_cluster_does_not_have_is_refused_before_anything_is_made(shell: Shell) -> None:
    toml = shell.toml
    toml.write_text(toml.read_text() + 'partition = "nope"\n')
    done = shell.atoll("run", "--executor", "lab", "--no-code", "-n", "2", "--", "true")
    assert done.returncode == 2
    assert "partition: 'nope' is not valid: sbatch: invalid partition" in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert json.loads(shell.atoll("ps", "--json").stdout) == []
    assert not (shell.folder / "shared").exists()


def test_a_wrong_option_names_file_and_field(shell: Shell) -> None:
    toml = shell.toml
    toml.write_text(toml.read_text() + 'time = "2 days"\n')
    done = shell.atoll("run", "--executor", "lab", "-n", "1", "--", "true")
    assert done.returncode == 2 or done.returncode == 1
    assert "executors.lab.time" in done.stderr
    assert "2 days" in done.stderr
