"""The mesh agent: a sidecar of each rank's pod that tests which other ranks it can reach. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from atoll.backends.kubernetes.names import AGENT, INDEX
from atoll.backends.kubernetes.options import KubernetesOptions
from atoll.backends.kubernetes.pod import Pod, when
from atoll.core.status import DesiredState, Training
from atoll.mesh.reach import FABRIC_DIR, agent_name

Json = dict[str, Any]

# Limits equal requests: anything else would change the pod's quality-of-service class.
AMOUNTS = {"cpu": "100m", "memory": "96Mi"}
RESTRICTED: Json = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "runAsUser": 65532,
    "seccompProfile": {"type": "RuntimeDefault"},
}


class Members(NamedTuple):
    """The agents that must reach each other, and when the last of them got its node."""

    agents: frozenset[str]
    placed_at: float


def fabric_folder(training: Training) -> str:
    """The training's folder in its etcd, named by uid because several trainings may share one."""
    return f"{FABRIC_DIR}/{training.uid}"


def render_agent(training: Training, etcd: str, options: KubernetesOptions) -> Json:
    """A native sidecar: it starts before the rank, and ends after it without delaying it."""
    fields = {
        "RANK": f"metadata.annotations['{INDEX}']",
        "NODE_NAME": "spec.nodeName",
        "POD_IP": "status.podIP",
    }
    # Kubernetes replaces `$(NAME)` here.
    command = [
        *("python", "-m", "atoll.mesh.fabric"),
        "--host=rank-$(RANK)@$(NODE_NAME)",
        "--address=$(POD_IP)",
        f"--etcd={etcd}",
        f"--folder={fabric_folder(training)}",
    ]
    return {
        "name": AGENT,
        "image": options.agent_image,
        "restartPolicy": "Always",
        "command": command,
        "env": [
            {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
            for name, path in fields.items()
        ],
        "resources": {"requests": AMOUNTS, "limits": AMOUNTS},
        "securityContext": RESTRICTED,
    }


def members(newest: Iterable[Pod], desired: DesiredState) -> Members | None:
    """The agents of the ranks that have a node; None while the scheduler has yet to decide on one.

    A rank for which there is no room is not waited for: it joins when it gets a node.
    """
    pods = [pod for pod in newest if pod.rank < desired.size]
    undecided = desired.size - len(pods) + sum(not _is_decided(pod) for pod in pods)
    on_nodes = [p for p in pods if p.node is not None and not p.is_over and not p.is_leaving]
    if undecided or not on_nodes:
        return None
    return Members(
        agents=frozenset(agent_name(p.rank, p.node) for p in on_nodes if p.node),
        placed_at=max(_placed_at(p) for p in on_nodes),
    )


def _is_decided(pod: Pod) -> bool:
    return pod.node is not None or pod.is_over or pod.waiting_reason == "Unschedulable"


def _placed_at(pod: Pod) -> float:
    return when(pod.condition("PodScheduled").get("lastTransitionTime")) or pod.created_at
