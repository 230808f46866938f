"""Room on the test nodes, taken and given back, for tests of ranks that find none."""

from __future__ import annotations

from tests.e2e.kubernetes.conftest import Site, Space
from tests.e2e.kubernetes.control_plane import wait_for
from tests.e2e.kubernetes.nodes import IMAGE

SLOTS = 4  # of a node


def slot(site: Site, count: int = 1) -> str:
    """So many of the four parts of a node, as an amount of CPU."""
    found = site.json("get", "node", site.nodes[0].name)
    return f"{int(found['status']['allocatable']['cpu']) * 225 * count}m"


def take_room(space: Space, name: str, node: int, slots: int) -> None:
    """A pod of that name holds them, until it is deleted."""
    container = {
        "name": "squatter",
        "image": IMAGE,
        "command": ["sleep", "1000"],
        "resources": {"requests": {"cpu": slot(space.site, slots)}},
    }
    body = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "nodeName": space.site.nodes[node].name,
            # Gone at once, it would be gone for the scheduler before it is for the kubelet.
            "terminationGracePeriodSeconds": 1,
            "automountServiceAccountToken": False,
            "containers": [container],
        },
    }

    def has_room() -> bool:
        """The kubelet turns it away while pods of the test before still end on the node."""
        space.kubectl("apply", "-f", "-", stdin=body)
        status = space.json("get", "pod", name)["status"]
        if status.get("phase") == "Failed":
            space.kubectl("delete", "pod", name)
        return {"type": "Ready", "status": "True"} in [
            {field: condition[field] for field in ("type", "status")}
            for condition in status.get("conditions", ())
        ]

    wait_for(f"{name} has its room", has_room)


def give_back(space: Space, name: str) -> None:
    space.kubectl("delete", "pod", name)
