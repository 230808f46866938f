"""How ranks find each other: which parts a training needs, and what its ranks are told of them.

Free of imports that cost: the process that supervises local ranks loads this file.
"""

from __future__ import annotations

ETCD_BACKEND = "etcd-v2"

# Set from what really is there; whatever the control plane's own environment says is wrong.
VARIABLES = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "BASILICA_RDZV_ENDPOINT",
    "ATOLL_MESH_ENDPOINT",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
)


def needs_etcd(backend: str, *, has_mesh: bool) -> bool:
    """The gate's keys live in etcd too, whatever the ranks use to meet."""
    return backend == ETCD_BACKEND or has_mesh


def rendezvous_environment(backend: str, master: str, port: int, etcd: str = "") -> dict[str, str]:
    """`etcd` is the endpoint of the training's etcd; empty if it has none, and so no gate."""
    return {
        "MASTER_ADDR": master,
        "MASTER_PORT": str(port),
        "BASILICA_RDZV_ENDPOINT": etcd if backend == ETCD_BACKEND else f"{master}:{port}",
        "ATOLL_MESH_ENDPOINT": etcd,
        # With the store shared, as torch has it by default, node 0 publishes the store's address
        # in the first round only. A node that joins later waits for it in the new round, under
        # c10d and etcd-v2 alike, and after 60 s the whole job fails.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
