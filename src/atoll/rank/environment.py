"""What every rank finds in its environment. Pure; the same on every executor."""

from __future__ import annotations

from atoll.core.status import Training

# Set to the rank's own number, by whatever starts the rank.
RANK_VARIABLES = ("RANK", "REPLICA_RANK", "ATOLL_RANK", "BASILICA_RANK")


def gang_environment(
    training: Training, *, host: str, master: str, port: int, rendezvous_uri: str
) -> dict[str, str]:
    """The part that all ranks share. `host:port` is where they find each other."""
    spec, world = training.spec, training.spec.world_size
    endpoint = f"{master}:{port}"
    return {
        "MASTER_ADDR": master,
        "MASTER_PORT": str(port),
        **spec.nccl_env,
        **spec.env,
        "WORLD_SIZE": str(world.target),
        "NODE_NAME": host,
        "ATOLL_NAME": spec.name,
        "ATOLL_NAMESPACE": training.namespace,
        "ATOLL_UID": training.uid,
        "ATOLL_WORLD_MIN": str(world.min),
        "ATOLL_WORLD_TARGET": str(world.target),
        "ATOLL_WORLD_MAX": str(world.max),
        "ATOLL_RENDEZVOUS_URI": rendezvous_uri,
        "BASILICA_RDZV_ENDPOINT": endpoint,
        "BASILICA_RDZV_ID": f"{spec.name}-{training.uid[:8]}",
        "BASILICA_WORLD_MIN": str(world.min),
        "BASILICA_WORLD_TARGET": str(world.target),
        "BASILICA_WORLD_MAX": str(world.max),
        "BASILICA_GPUS_PER_POD": str(max(spec.resources.gpu_count, 1)),
        # Otherwise a node that joins a running torchrun job kills it: see core/rendezvous.py.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
