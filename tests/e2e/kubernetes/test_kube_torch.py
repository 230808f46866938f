"""torchrun across two pods on two nodes, by either rendezvous: the proof that ranks can meet.

torch is too big for a test image, so this machine's is lent to the pods.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.kubernetes.conftest import Operator, Site, Space
from tests.e2e.kubernetes.images import ATOLL, ETCD

pytestmark = pytest.mark.usefixtures("pods")

LIBRARIES = "/usr/lib/x86_64-linux-gnu"  # libstdc++ among them
SCRIPT = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
mine = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(mine)
print("sum", mine.item(), "of", dist.get_world_size(), flush=True)
dist.destroy_process_group()  # gloo's threads abort a process that ends under them
"""
RUN = """
printf '%s' "$SCRIPT" > /tmp/train.py
export PYTHONPATH={packages}
exec python -m torch.distributed.run --rdzv-backend={backend} \
  --rdzv-endpoint=$BASILICA_RDZV_ENDPOINT --rdzv-id=$BASILICA_RDZV_ID \
  --nnodes=2 --nproc-per-node=1 /tmp/train.py
"""


@pytest.fixture
def packages(site: Site) -> Path:
    """Where torch is on this machine, which is also its nodes'."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None or not importlib.util.find_spec("etcd"):
        pytest.skip("torch and python-etcd are not on this machine, so pods cannot borrow them")
    if not site.is_own:
        pytest.skip("the nodes of this cluster have no torch to lend to pods")
    return Path(found.origin).parents[1]


@pytest.mark.parametrize("backend", ["c10d", "etcd-v2"])
def test_torchrun_meets_across_pods(
    space: Space, packages: Path, start_operator: Callable[..., Operator], backend: str
) -> None:
    lent = {"torch": str(packages), "libraries": LIBRARIES}
    options = {
        "etcdImage": ETCD,
        "volumes": [{"name": name, "hostPath": {"path": path}} for name, path in lent.items()],
        "volumeMounts": [
            {"name": name, "mountPath": path, "readOnly": True} for name, path in lent.items()
        ],
    }
    start_operator("one", "--options", json.dumps(options))
    for node in space.site.nodes:
        label = f"atoll.dev/provider={node.name}"
        space.site.kubectl("label", "node", node.name, label, "--overwrite")
    space.submit(
        "tiny",
        image=ATOLL,
        command=["sh", "-c", RUN.format(packages=packages, backend=backend)],
        env={"SCRIPT": SCRIPT},
        worldSize={"min": 2, "target": 2, "max": 2},
        topologySpread="provider-aware",
        rendezvous={"backend": backend},
    )
    status = space.until_phase("tiny", "succeeded", timeout=100)
    assert {rank["node"] for rank in status["ranks"]} == {n.name for n in space.site.nodes[:2]}
    for pod in space.pods():
        if pod["metadata"]["labels"].get("atoll.dev/part") == "rank":
            assert "sum 3.0 of 2" in space.kubectl("logs", pod["metadata"]["name"]).stdout
