"""What somebody with kubectl does to the objects of a training behind its back."""

from __future__ import annotations

import json

import pytest

from tests.e2e.kubernetes.conftest import Operator, Space
from tests.e2e.kubernetes.control_plane import wait_for

pytestmark = pytest.mark.usefixtures("pods")


def start(space: Space, **spec: object) -> str:
    space.submit("it", command=["sleep", "600"], **spec)
    space.until_ready("it", 2)
    return str(space.json("get", "jobs")["items"][0]["metadata"]["name"])


def delete(space: Space) -> None:
    space.kubectl("delete", "training", "it", "--timeout=50s")
    wait_for("nothing is left", lambda: not space.json("get", "pods,jobs")["items"])


def test_a_deleted_configmap_and_service_come_back_with_the_next_rank(
    space: Space, operator: Operator
) -> None:
    name = start(space)
    space.kubectl("delete", "service", name)
    space.kubectl("scale", "training", "it", "--replicas=3")
    space.until_ready("it", 3)
    space.json("get", "service", name)
    space.kubectl("delete", "configmap", name)
    space.kubectl("scale", "training", "it", "--replicas=4")
    space.until_ready("it", 4)
    assert space.json("get", "configmap", name)["data"]["size"] == "4"
    space.kubectl("delete", "configmap", name)
    delete(space)


def test_a_restarted_rank_does_not_wait_for_a_deleted_configmap(
    space: Space, operator: Operator
) -> None:
    name = start(space, maxRestarts=3)
    space.kubectl("delete", "configmap", name)
    space.kubectl("delete", "pod", "--wait=false", space.pods(1)[0]["metadata"]["name"])
    space.until(
        "it", "rank 1 is back", lambda s: [r.get("restarts", 0) for r in s["ranks"]] == [0, 1]
    )
    space.until_ready("it", 2)


def test_a_job_that_is_resized_by_hand_gets_its_size_back(space: Space, operator: Operator) -> None:
    name = start(space, maxRestarts=3)
    space.kubectl("patch", "job", name, "--type=merge", "-p", '{"spec": {"parallelism": 1}}')
    wait_for("its size is back", lambda: space.json("get", "job", name)["spec"]["parallelism"] == 2)
    space.until_ready("it", 2)


def test_a_training_with_a_spoilt_status_can_be_deleted(space: Space, operator: Operator) -> None:
    start(space)
    words = ("patch", "training", "it", "--subresource=status", "--type=merge", "-p")
    refused = space.kubectl(*words, json.dumps({"status": {"ranks": "rubbish"}}), is_checked=False)
    assert "status.ranks: Invalid value" in refused.stderr
    spoilt = {"ranks": [{"ranks": "rubbish"}]}  # of the right type
    space.kubectl(*words, json.dumps({"status": spoilt}))
    delete(space)


def test_a_rank_says_which_volume_it_waits_for(space: Space, start_operator: object) -> None:
    options = {
        "volumes": [{"name": "data", "configMap": {"name": "no-such-thing"}}],
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
    }
    start_operator("one", "--options", json.dumps(options))  # type: ignore[operator]
    space.submit("it", command=["true"])
    space.until(
        "it",
        "it is told",
        lambda s: '"no-such-thing" not found' in (s.get("ranks") or [{}])[0].get("message", ""),
    )


def test_an_option_with_a_field_that_does_not_exist_is_refused(
    space: Space, start_operator: object
) -> None:
    options = {"tolerations": [{"keys": "dedicated", "operator": "Exists"}]}
    start_operator("one", "--options", json.dumps(options))  # type: ignore[operator]
    space.submit("it", command=["true"])
    status = space.until_phase("it", "failed")
    assert 'unknown field "spec.template.spec.tolerations[0].keys"' in status["message"]


def test_a_job_that_a_quota_forbids_is_told_and_made_when_there_is_room(
    space: Space, operator: Operator
) -> None:
    space.kubectl("create", "quota", "none", "--hard=count/jobs.batch=0")
    wait_for("the quota holds", lambda: space.json("get", "quota", "none")["status"].get("hard"))
    space.submit("it", command=["true"])
    space.until(
        "it",
        "it is told",
        lambda s: "exceeded quota: none" in (s.get("ranks") or [{}])[0].get("message", ""),
    )
    assert "Traceback" not in operator.log.read_text()
    space.kubectl("delete", "quota", "none")
    space.until_phase("it", "succeeded")
