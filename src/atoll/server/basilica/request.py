"""Requests of the basilica-sdk client, and the trainings they describe. Pure.

Unknown fields are refused, so that nothing in a request is silently dropped.
"""

from __future__ import annotations

from typing import Any

import msgspec

from atoll.core.checks import TEXT, check_as, is_text
from atoll.core.errors import ValidationError
from atoll.core.model import SpecModel
from atoll.core.spec import (
    BenchSpec,
    IntegerSeconds,
    ProviderFilter,
    RendezvousSpec,
    Resources,
    Source,
    TrainingSpec,
    WorldSize,
)
from atoll.server.basilica.shell import shell_script


class Gpus(SpecModel, frozen=True):
    count: int = 0
    model: list[str] = []
    min_gpu_memory_gb: int | None = None


class Needs(SpecModel, frozen=True):
    cpu: str | None = None
    memory: str | None = None
    gpus: Gpus | None = None


class RendezvousChoice(SpecModel, frozen=True):
    backend: str = "etcd-v2"


class Providers(SpecModel, frozen=True):
    include: list[str] = []
    exclude: list[str] = []


class Spread(SpecModel, frozen=True):
    strategy: str = "provider-aware"


class Nccl(SpecModel, frozen=True):
    env: dict[str, str] = {}


class Bench(SpecModel, frozen=True):
    mode: str = "off"
    placement: str | None = None


class DeploymentWorld(SpecModel, frozen=True):
    """Not checked here: `TrainingSpec` checks the bounds."""

    min: int
    target: int
    max: int


class Distributed(SpecModel, frozen=True):
    world_size: DeploymentWorld
    enabled: bool = True
    command: str = "auto"
    rendezvous: RendezvousChoice = RendezvousChoice()
    provider_filter: Providers = Providers()
    topology_spread: Spread = Spread()
    nccl: Nccl = Nccl()
    bench: Bench = Bench()


class Create(SpecModel, frozen=True):
    """The body of a create. `replicas`, `port` and `enable_billing` are accepted and ignored."""

    instance_name: str
    distributed: Distributed
    image: str | None = None
    replicas: int | None = None
    port: int | None = None
    command: list[str] | None = None
    args: list[str] | None = None
    env: dict[str, str] | None = None
    resources: Needs = Needs()
    ttl_seconds: int | None = None
    enable_billing: bool | None = None


# Which field of the request a field of the training comes from.
FIELDS = {
    "name": "instanceName",
    "source": "distributed.command",
    "world_size.min": "distributed.worldSize.min",
    "world_size.target": "distributed.worldSize.target",
    "world_size.max": "distributed.worldSize.max",
    "rendezvous_backend": "distributed.rendezvous.backend",
    "provider_filter.include": "distributed.providerFilter.include",
    "provider_filter.exclude": "distributed.providerFilter.exclude",
    "topology_spread": "distributed.topologySpread.strategy",
    "nccl_env": "distributed.nccl.env",
    "bench": "distributed.bench.mode",
    "bench_placement": "distributed.bench.placement",
    "cpu": "resources.cpu",
    "memory": "resources.memory",
    "gpu_count": "resources.gpus.count",
    "gpu_models": "resources.gpus.model",
    "min_gpu_memory_gb": "resources.gpus.minGpuMemoryGb",
    "ttl_seconds": "ttlSeconds",
    "deadline_s": "ttlSeconds",
}


def spec_of(create: Create, *, backend: str, path_first: str | None = None) -> TrainingSpec:
    """The spec of the requested training. `backend` is the rendezvous backend in use.

    `ttlSeconds` limits the run, as on the Basilica platform; the record is then kept for as long
    again, so that nobody waits for a training and finds it deleted.
    """
    distributed = create.distributed
    if not distributed.command.strip():
        raise ValidationError("source", distributed.command, "expected a command to run")
    if not is_text(distributed.command):
        raise ValidationError("source", distributed.command, TEXT)
    args = [*(create.command or ()), *(create.args or ())]
    script = shell_script(distributed.command, args=args, backend=backend, path_first=path_first)
    gpus = create.resources.gpus or Gpus()
    ttl_seconds = create.ttl_seconds or None
    check_as("ttl_seconds", ttl_seconds, IntegerSeconds | None)
    return TrainingSpec(
        name=create.instance_name,
        world_size=WorldSize(
            min=distributed.world_size.min,
            target=distributed.world_size.target,
            max=distributed.world_size.max,
        ),
        source=Source(kind="shell", content=script.encode(), filename="command.sh"),
        args=args,
        image=create.image,
        env=create.env or {},
        resources=Resources(
            cpu=create.resources.cpu,
            memory=create.resources.memory,
            gpu_count=gpus.count,
            gpu_models=gpus.model,
            min_gpu_memory_gb=gpus.min_gpu_memory_gb,
        ),
        provider_filter=ProviderFilter(
            include=distributed.provider_filter.include or None,
            exclude=distributed.provider_filter.exclude,
        ),
        topology_spread=distributed.topology_spread.strategy,  # type: ignore[arg-type]
        nccl_env=distributed.nccl.env,
        bench=BenchSpec(
            mode=distributed.bench.mode,  # type: ignore[arg-type]
            placement=distributed.bench.placement or "preferred",
        ),
        rendezvous=RendezvousSpec(backend=backend),  # type: ignore[arg-type]
        deadline_s=None if ttl_seconds is None else float(ttl_seconds),
        ttl_seconds=ttl_seconds,
    )


class Probe(msgspec.Struct):
    """The part of a create that tells a distributed training from other deployments."""

    distributed: Any = None
