"""A project of many files reaches pods without an image of its own."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll import Client, KubernetesExecutor, WorldSize
from tests.e2e.conftest import Shell
from tests.e2e.kubernetes.conftest import Site, Space
from tests.e2e.kubernetes.control_plane import wait_for
from tests.e2e.kubernetes.images import ATOLL
from tests.e2e.kubernetes.nodes import IMAGE
from tests.e2e.kubernetes.test_kube_server import client, operator, port  # noqa: F401

pytestmark = pytest.mark.usefixtures("pods")

TRAIN = """
import os, sys
sys.path.insert(0, "lib")
from model.net import NAME
import helper
first = not os.path.exists("seen")
open("seen", "w").close()
print("rank", os.environ["RANK"], NAME, helper.WORD, len(open("noise.bin", "rb").read()))
sys.exit(3 if os.environ["ATOLL_ATTEMPT"] == "0" and os.environ["RANK"] == "1" else 0)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """More than one ConfigMap holds."""
    root = tmp_path / "project"
    for path, text in {
        "train.py": TRAIN,
        "model/__init__.py": "",
        "model/net.py": "NAME = 'a net'",
        "lib/helper.py": "WORD = 'helps'",
        "secret.txt": "not for others",
        ".atollignore": "secret.txt",
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    (root / "noise.bin").write_bytes(os.urandom(2_000_000))
    return root


@pytest.fixture
def laptop(space: Space, project: Path, tmp_path: Path) -> Iterator[Shell]:
    if not space.site.is_own:
        pytest.skip("the image with Python is only on the nodes that these tests start")
    config = tmp_path / "config"
    config.mkdir()
    (config / "kube.json").write_text(space.site.kubeconfig.read_text())
    (config / "atoll.toml").write_text(
        f"""
        [executors.eu]
        kind = "kubernetes"
        kubeconfig = "kube.json"
        namespace = "{space.name}"
        image = "{ATOLL}"
        """
    )
    shell = Shell(tmp_path / "state", project)
    shell.env["ATOLL_CONFIG"] = str(config / "atoll.toml")
    yield shell
    shell.stop()


def code_maps(space: Space) -> list[str]:
    maps = space.json("get", "configmaps", "-l", "atoll.dev/code")["items"]
    return sorted(item["metadata"]["name"] for item in maps)


def test_the_command_line_sends_a_project_and_a_rank_that_is_started_again_has_it_too(
    laptop: Shell, space: Space
) -> None:
    run = ("run", "--executor", "eu", "-n", "2", "--max-restarts", "1")
    ran = laptop(*run, "--name", "one", "--", "python", "train.py")
    assert ran.returncode == 0, ran.stderr
    assert "atoll: code: 6 files, 1.9 MiB, 1.9 MiB packed, sha256 " in ran.stderr
    lines = [f"rank {rank} a net helps 2000000" for rank in (0, 1)]
    assert all(line in ran.stdout for line in lines), ran.stdout
    assert ran.stdout.count(lines[1]) == 2
    maps = code_maps(space)
    assert len(maps) == 3
    ran = laptop(*run, "--name", "two", "--", "python", "train.py")
    assert ran.returncode == 0, ran.stderr
    assert code_maps(space) == maps
    laptop("rm", "-f", "one")
    ran = laptop("run", "--executor", "eu", "--no-code", "--", "ls", "train.py")
    assert ran.returncode == 1
    assert "code:" not in ran.stderr
    assert code_maps(space) == maps
    laptop("rm", "-f", "two")
    wait_for("the code is gone with the last training", lambda: not code_maps(space))


def test_a_library_launch_of_a_function_finds_the_modules_it_imports(
    site: Site, space: Space, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not site.is_own:
        pytest.skip("the image with Python is only on the nodes that these tests start")
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend(str(project / "lib"))

    def work() -> str:
        import helper  # type: ignore[import-not-found]

        return str(helper.WORD)

    with KubernetesExecutor(
        kubeconfig=str(site.kubeconfig), namespace=space.name, image=ATOLL
    ) as executor:
        reports = executor.collect(executor.launch_replicas(2, work, {}), timeout=90)
        assert [(r["error"], r["result"]) for r in reports] == [(None, "helps")] * 2
    wait_for("the code is gone", lambda: not code_maps(space))


def test_an_image_without_python_unpacks_it_too(
    site: Site, space: Space, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "part").mkdir()
    (tmp_path / "part/words").write_text("from a file")
    (tmp_path / "work.sh").write_text("cat part/words")
    monkeypatch.chdir(tmp_path)
    with KubernetesExecutor(
        kubeconfig=str(site.kubeconfig), namespace=space.name, image=IMAGE, python="sh"
    ) as executor:
        handles = executor.launch_replicas(1, "work.sh", {})
        (report,) = executor.collect(handles, timeout=90)
        assert (report["error"], executor.stream_logs(handles[0])) == (None, "from a file")


def test_the_operator_keeps_the_code_of_custom_resources(
    client: Client,  # noqa: F811
    space: Space,
    project: Path,
) -> None:
    """Its store is the cluster: a resource has no room for two megabytes."""
    if not space.site.is_own:
        pytest.skip("the image with Python is only on the nodes that these tests start")
    training = client.deploy_distributed(
        "coded",
        command=["python", "train.py"],
        image=ATOLL,
        working_dir=project,
        max_restarts=1,
        world_size=WorldSize(min=1, target=2, max=2),
    )
    training.result(timeout=120)
    assert any("a net helps" in line.text for line in training.logs(rank=0))
    (item,) = space.json("get", "trainings")["items"]
    assert len(json.dumps(item["spec"])) < 2000
    training.delete()
    wait_for("the code is gone", lambda: not code_maps(space))
