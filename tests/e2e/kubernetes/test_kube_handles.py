"""Launches from scripts on a cluster: they outlive the script, and any process follows them."""

from __future__ import annotations

import copy
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from atoll import EKSExecutor, KubernetesExecutor, NotFound, ReplicaHandle, ValidationError
from atoll.core.errors import Denied
from tests.e2e.kubernetes.conftest import REPOSITORY, Site, Space
from tests.e2e.kubernetes.control_plane import wait_for
from tests.e2e.kubernetes.images import ATOLL
from tests.e2e.kubernetes.nodes import IMAGE

pytestmark = [pytest.mark.usefixtures("pods"), pytest.mark.timeout(300)]

WAITING = """echo rank $RANK; trap 'exit 9' TERM; while :; do sleep 0.1; done"""
LAUNCH = """
import sys, time
from atoll import KubernetesExecutor
config, namespace, image, script, is_waiting = sys.argv[1:]
executor = KubernetesExecutor(image, kubeconfig=config, namespace=namespace, python="sh")
handles = executor.launch_replicas(2, script, {}, timeout=600)
for handle in handles:
    print(handle.to_json(), flush=True)
if is_waiting == "yes":
    executor.collect(handles)
"""
OBJECTS = "jobs,services,configmaps,pods"


def script(folder: Path, text: str) -> str:
    path = folder / "work.sh"
    path.write_text(text)
    return str(path)


def launched(site: Site, space: Space, file: str, *, is_killed: bool) -> list[ReplicaHandle]:
    """By a script that was killed with -9, or that simply ended."""
    waits = "yes" if is_killed else "no"
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, str(site.kubeconfig), space.name, IMAGE, file, waits],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY / "src")},
        stdout=subprocess.PIPE,
        text=True,
    )
    with launcher:
        assert launcher.stdout is not None
        handles = [ReplicaHandle.from_json(launcher.stdout.readline()) for _ in range(2)]
        if is_killed:
            os.kill(launcher.pid, signal.SIGKILL)
        code = launcher.wait(60)
    assert code == (-signal.SIGKILL if is_killed else 0)
    return handles


@pytest.fixture
def make(site: Site, space: Space) -> Iterator[Any]:
    made: list[KubernetesExecutor] = []

    def another(**options: Any) -> KubernetesExecutor:
        more = {"kubeconfig": str(site.kubeconfig), "namespace": space.name, "python": "sh"}
        made.append(KubernetesExecutor(**{"image": IMAGE} | more | options))
        return made[-1]

    yield another
    for executor in made:
        executor.close()


def test_another_process_polls_reads_cancels_and_collects_after_a_kill(
    site: Site, space: Space, tmp_path: Path, make: Any
) -> None:
    handles = launched(site, space, script(tmp_path, WAITING), is_killed=True)
    name = handles[0].metadata["job_name"]
    assert handles[1].metadata["namespace"] == space.name
    (job,) = space.json("get", "jobs")["items"]
    assert job["metadata"]["name"] == name
    assert job["metadata"]["labels"]["atoll.dev/uid"] == handles[0].metadata["uid"]
    assert job["spec"]["template"]["spec"]["containers"][0]["name"] == "replica"
    other, watching = make(), make()
    wait_for("both run", lambda: {other.poll(handle) for handle in handles} == {"running"})
    wait_for("it prints", lambda: other.stream_logs(handles[1]) == "rank 1")
    assert other.attach(name) == handles
    assert watching.poll(handles[0]) == "running"
    plain = ReplicaHandle(0, "kubernetes", {"job_name": name, "namespace": space.name})
    assert watching.poll(plain) == "running"
    other.cancel(handles[0])
    for executor in (other, watching):
        reports = executor.collect(handles, timeout=60)
        assert [report["status"] for report in reports] == ["cancelled", "cancelled"]
        assert [report["exit_code"] for report in reports] == [9, 9]
        assert {report["job_name"] for report in reports} == {name}
    other.close()
    assert watching.poll(handles[0]) == "cancelled"
    # It ends by itself, stays for who comes later, and is removed in time.
    wait_for("the Job is over", lambda: finished(space, name))
    later = make()
    assert [report["status"] for report in later.collect(handles, timeout=30)] == ["cancelled"] * 2
    assert later.stream_logs(handles[0]) == "rank 0"
    later.cancel(handles[0])
    assert job["spec"]["ttlSecondsAfterFinished"] > 0
    with pytest.raises(ValidationError, match=r"handle\.rank"):
        later.poll(ReplicaHandle(2, "kubernetes", handles[0].metadata))


def finished(space: Space, name: str) -> bool:
    job = space.json("get", "job", name)
    return any(c["type"] == "Failed" for c in job["status"].get("conditions", ()))


def test_a_script_that_returns_leaves_its_job_and_its_end_is_there_for_all(
    site: Site, space: Space, tmp_path: Path, make: Any
) -> None:
    text = "echo bye from $RANK; sleep 1; exit $((RANK * 4))"
    handles = launched(site, space, script(tmp_path, text), is_killed=False)
    first, second = make(), make()
    reports = first.collect(handles, timeout=90)
    assert [report["exit_code"] for report in reports] == [0, 4]
    assert [report["status"] for report in reports] == ["succeeded", "failed"]
    assert "bye from 1" in reports[1]["error"]
    first.close()
    assert [report["exit_code"] for report in second.collect(handles, timeout=30)] == [0, 4]
    assert second.stream_logs(handles[0]) == "bye from 0"
    third = make()
    assert [third.poll(handle) for handle in handles] == ["succeeded", "failed"]


def test_a_deleted_job_is_cancelled_and_an_unknown_one_too(
    site: Site, space: Space, tmp_path: Path, make: Any
) -> None:
    launcher, other = make(), make()
    handles = launcher.launch_replicas(2, script(tmp_path, WAITING), {})
    name = handles[0].metadata["job_name"]
    wait_for("both run", lambda: {other.poll(handle) for handle in handles} == {"running"})
    space.kubectl("delete", "job", name)
    for executor in (launcher, other, make()):
        reports = executor.collect(handles, timeout=60)
        assert [report["status"] for report in reports] == ["cancelled", "cancelled"]
        assert reports[0]["error"] == f"the Job {name} no longer exists"
        assert {executor.poll(handle) for handle in handles} == {"cancelled"}
        executor.cancel(handles[0])
    with pytest.raises(NotFound, match=f"kubernetes launch '{name}' not found"):
        other.attach(name)
    here = {"job_name": "nobody", "namespace": space.name}
    unknown = ReplicaHandle(0, "kubernetes", here)
    assert other.poll(unknown) == "cancelled"
    other.cancel(unknown)
    assert other.stream_logs(unknown) == "(nothing to read yet)"
    eks = EKSExecutor(IMAGE, namespace=space.name, kubeconfig=str(site.kubeconfig))
    with pytest.raises(ValidationError, match="belongs to another backend"):
        eks.cancel(unknown)
    with pytest.raises(ValidationError, match=r"handle\.metadata\.namespace"):
        other.cancel(ReplicaHandle(0, "kubernetes", {**here, "namespace": "elsewhere"}))
    eks.close()


def test_the_deadline_of_the_job_is_told_by_who_comes_later(
    site: Site, space: Space, tmp_path: Path, make: Any
) -> None:
    launcher = make()
    handles = launcher.launch_replicas(1, script(tmp_path, WAITING), {}, timeout=3)
    reports = launcher.collect(handles, timeout=60)
    assert reports[0]["status"] == "failed"
    (report,) = make().collect(handles, timeout=60)
    assert report["status"] == "failed"
    assert "3 s after the start" in report["error"]


def as_user(site: Site, space: Space, folder: Path, role: Any) -> Path:
    """A kubeconfig of a ServiceAccount that has this role and nothing else."""
    space.kubectl("create", "serviceaccount", "user")
    space.kubectl("apply", "-f", "-", stdin=role)
    name = role["metadata"]["name"]
    bound = f"--serviceaccount={space.name}:user"
    space.kubectl("create", "rolebinding", "user", f"--role={name}", bound)
    config = json.loads(site.kubeconfig.read_text())
    token = space.kubectl("create", "token", "user", "--duration=1h").stdout.strip()
    config["users"] = [{"name": "admin", "user": {"token": token}}]
    path = folder / "user.kubeconfig"
    path.write_text(json.dumps(config))
    return path


def library_role() -> Any:
    return yaml.safe_load((REPOSITORY / "docs" / "library-role.yaml").read_text())


def test_the_documented_role_is_enough(
    site: Site,
    space: Space,
    tmp_path: Path,
    make: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    config = str(as_user(site, space, tmp_path, library_role()))
    with make(kubeconfig=config) as executor:
        handles = executor.launch_replicas(2, script(tmp_path, WAITING), {})
        wait_for("both run", lambda: {executor.poll(h) for h in handles} == {"running"})
        make(kubeconfig=config).cancel(handles[0])
        assert [r["status"] for r in executor.collect(handles, timeout=60)] == ["cancelled"] * 2
        executor.stream_logs(handles[0])
    wait_for(
        "nothing is left", lambda: not space.json("get", OBJECTS, "-l", "atoll.dev/uid")["items"]
    )
    assert "forbidden" not in caplog.text


@pytest.mark.parametrize(
    ("group", "resource", "verb", "right"),
    [
        ("batch", "jobs", "create", 'cannot create resource "jobs" in API group "batch"'),
        ("", "services", "create", 'cannot create resource "services"'),
        ("", "pods", "list", 'cannot list resource "pods"'),
    ],
)
def test_a_missing_right_is_told_and_nothing_is_created(
    site: Site,
    space: Space,
    tmp_path: Path,
    make: Any,
    group: str,
    resource: str,
    verb: str,
    right: str,
) -> None:
    role = copy.deepcopy(library_role())
    for rule in role["rules"]:
        if rule["apiGroups"] == [group] and rule["resources"] == [resource]:
            rule["verbs"].remove(verb)
    executor = make(kubeconfig=str(as_user(site, space, tmp_path, role)))
    with pytest.raises(Denied, match=right):
        executor.launch_replicas(2, script(tmp_path, WAITING), {})
    assert space.json("get", OBJECTS, "-l", "atoll.dev/uid")["items"] == []


def test_a_result_of_a_function_is_read_by_another_process(
    site: Site, space: Space, make: Any
) -> None:
    if not site.is_own:
        pytest.skip("the image with Python is only on the nodes that these tests start")
    launcher = make(image=ATOLL, python="python")
    handles = launcher.launch_replicas(2, lambda base: (base, b"x"), {"base": 40})
    reports = make().collect(handles, timeout=90)
    assert [report["error"] for report in reports] == [None, None]
    assert [report["result"] for report in reports] == [(40, b"x"), (40, b"x")]
