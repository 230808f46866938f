"""What release 0.1 keeps in a cluster, printed as JSON. Runs with that release on the path.

For each case: the training, its resource as the API server shows it, its Job and pods, and what the
release itself reads from those.
"""

from __future__ import annotations

import json
from typing import Any

from atoll.executors.kubernetes_gate import render_opened
from atoll.executors.kubernetes_names import FAILURES, FINALIZER, INDEX
from atoll.executors.kubernetes_options import Options
from atoll.executors.kubernetes_read import look
from atoll.executors.kubernetes_render import render_job
from atoll.store.kubernetes_resource import status_body, to_resource, with_events
from msgspec.structs import replace

from atoll.core.model import encode
from atoll.core.plan import plan
from atoll.core.spec import (
    BenchSpec,
    ProviderFilter,
    RendezvousSpec,
    Resources,
    Source,
    TrainingSpec,
    WorldSize,
)
from atoll.core.status import Event, Training, Wish

Json = dict[str, Any]
MADE = "2027-01-15T08:00:00Z"
NOW = 1_800_000_060.0
OPTIONS = Options(is_exit_held=True, is_start_gated=True)
TRAININGS = {
    "plain": {"command": ["python", "train.py"]},
    "source": {
        "source": Source(kind="script", content=b"print(1)\n", filename="train.py"),
        "args": ["--lr", "0.1"],
        "pip_packages": ["einops>=0.8"],
        "rendezvous": RendezvousSpec(backend="etcd-v2", uri="s3://bucket/run42"),
        "provider_filter": ProviderFilter(include=["aws"], exclude=["azure"]),
    },
    "gpu": {
        "command": ["torchrun", "train.py"],
        "resources": Resources(cpu="8", memory="64Gi", gpu_count=8, gpu_models=["H100"]),
        "bench": BenchSpec(mode="on-start"),
        "env": {"A": "$(RANK)"},
        "nccl_env": {"NCCL_DEBUG": "INFO"},
        "max_restarts": 3,
        "deadline_s": 3600.5,
        "ttl_seconds": 60,
        "mesh": True,
    },
}
EVENTS = [Event(type="Normal", reason="Admitted", message="starting", at=NOW - 50.0)]


def plain(value: object) -> Any:
    return json.loads(encode(value))


def pods_of(job: Json, states: list[Json], gate: Json) -> list[Json]:
    """As the Job controller makes them from the template, and the kubelet fills them in."""
    template = job["spec"]["template"]
    return [
        {
            "metadata": {
                **template["metadata"],
                "name": f"{job['metadata']['name']}-{rank}-abcde",
                "namespace": "team-a",
                "creationTimestamp": MADE,
                "annotations": {
                    **template["metadata"].get("annotations", {}),
                    INDEX: str(rank),
                    FAILURES: "0",
                },
                "finalizers": [FINALIZER],
                "ownerReferences": [{"kind": "Job", "name": job["metadata"]["name"]}],
            },
            "spec": {**template["spec"], "nodeName": f"node-{rank}"},
            "status": {
                "phase": "Failed" if "terminated" in state else "Running" if state else "Pending",
                "initContainerStatuses": [{"name": "start-gate", "state": gate}],
                "containerStatuses": [{"name": "rank", "state": state}] if state else [],
            },
        }
        for rank, state in enumerate(states)
    ]


PASSED = {"terminated": {"exitCode": 0, "startedAt": MADE, "finishedAt": MADE}}
RUNNING = {"running": {"startedAt": MADE}}
FELL = {
    "terminated": {
        "exitCode": 7,
        "reason": "Error",
        "message": "loss is nan\n",
        "startedAt": MADE,
        "finishedAt": "2027-01-15T08:00:30Z",
    }
}
WORLDS = {
    "at the gate": ([{}, {}, {}], {"running": {"startedAt": MADE}}, False),
    "running": ([RUNNING, RUNNING, RUNNING], PASSED, True),
    "one fell": ([RUNNING, FELL, RUNNING], PASSED, True),
}


def case(name: str, world: str) -> Json:
    spec = TrainingSpec(
        name=name,
        executor="kubernetes",
        image="ghcr.io/acme/train:1",
        world_size=WorldSize(min=2, target=3, max=8),
        **TRAININGS[name],
    )
    training = Training(
        namespace="team-a", uid=f"5f1c3b1e-{name}", spec=spec, created_at=NOW - 60, generation=2
    )
    states, gate, is_opened = WORLDS[world]
    job = render_job(training, Wish(version=2, size=3), OPTIONS)
    job["status"] = {"startTime": MADE}
    if is_opened:
        job["metadata"]["annotations"] |= render_opened(NOW - 55)["metadata"]["annotations"]
    pods = pods_of(job, states, gate)
    seen = look(training, job, pods, OPTIONS, NOW)
    status = plan(training, seen.seen, NOW).status
    training = replace(training, status=status, resource_version=41)
    resource = to_resource(training, "a-mark")
    resource["metadata"] |= {
        "namespace": "team-a",
        "uid": training.uid,
        "generation": 2,
        "resourceVersion": "41",
        "creationTimestamp": MADE,
    }
    events = with_events({}, EVENTS)
    resource["status"] = status_body(training, status, events)
    return {
        "training": plain(training),
        "events": events,
        "resource": resource,
        "job": job,
        "pods": pods,
        "seen": plain(seen.seen),
        "gate": [seen.gate.is_open, seen.gate.is_due, len(seen.gate.held)],
    }


if __name__ == "__main__":
    for name in TRAININGS:
        for world in WORLDS:
            print(json.dumps(case(name, world), separators=(",", ":")))
