"""What an executor does not support is told: every field is rendered, refused, or in its table."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from atoll.backends.base import StoreBackend
from atoll.backends.kubernetes.options import KubernetesOptions
from atoll.backends.kubernetes.render import render_job as kubernetes_job
from atoll.backends.sagemaker.options import SageMakerOptions
from atoll.backends.sagemaker.render import render_job as sagemaker_job
from atoll.backends.slurm.options import SlurmOptions
from atoll.backends.slurm.render import render_script
from atoll.core.errors import ValidationError
from atoll.core.executors import KINDS, load
from atoll.core.ports import describe_unsupported, ignore, optional_fields, unsupported_fields
from atoll.core.spec import BenchSpec, ProviderFilter, Resources, TrainingSpec, WorldSize
from atoll.core.status import DesiredState, Training

PLAIN = TrainingSpec(name="t", world_size=WorldSize(min=1, target=1, max=1), command=["true"])
A100 = Resources(gpu_count=1, gpu_models=["A100"])
T4 = Resources(gpu_count=1, gpu_models=["T4"])
ROLE = "arn:aws:iam::1:role/x"


def of(spec: TrainingSpec) -> Training:
    return Training(namespace="default", uid="0" * 32, spec=spec)


def slurm(spec: TrainingSpec, options: Any) -> object:
    where = {"folder": "/f", "python": "python", "attempt": 0, "offset": 0, "tasks": [0]}
    return render_script(of(spec), options, **where), options.container and spec.image


def kubernetes(spec: TrainingSpec, options: Any) -> object:
    # What runs beside the ranks is not in their Job.
    return kubernetes_job(of(spec), DesiredState(version=1, size=1), options), spec.bench


Render = Callable[[TrainingSpec, Any], object]
BACKENDS: dict[str, tuple[Any, Render]] = {
    "kubernetes": (KubernetesOptions(image="i", agent_image="a"), kubernetes),
    "slurm": (SlurmOptions(), slurm),
    "slurm with containers": (SlurmOptions(container="pyxis"), slurm),
    "sagemaker": (
        SageMakerOptions(role=ROLE, store="s3://bucket/p", image="i"),
        lambda s, o: sagemaker_job(of(s), (0, 0), o),
    ),
    "sagemaker with an instance": (
        SageMakerOptions(role=ROLE, store="s3://bucket/p", image="i", instance_type="ml.m5.large"),
        lambda s, o: sagemaker_job(of(s), (0, 0), o),
    ),
}
for kind in KINDS:
    backend = load(kind)
    if kind not in BACKENDS and issubclass(backend, StoreBackend):  # a new one is tried by itself
        assert backend.options_type is not None
        options = backend.options_type(store="s3://b/p", image="i")
        BACKENDS[kind] = (options, lambda s, o, render=backend.render: render(of(s), (0, 0), o))
# By field: a spec without it and one with it.
PAIRS: dict[str, list[tuple[TrainingSpec, TrainingSpec]]] = {
    "image": [(PLAIN, replace(PLAIN, image="x/y:1"))],
    "provider_filter": [(PLAIN, replace(PLAIN, provider_filter=ProviderFilter(include=["p"])))],
    "topology_spread": [(PLAIN, replace(PLAIN, topology_spread="pack"))],
    "bench": [(PLAIN, replace(PLAIN, bench=BenchSpec(mode="on-start")))],
    **{
        field: [
            (replace(PLAIN, resources=base), replace(PLAIN, resources=replace(base, **{field: x})))
            for base in (Resources(), T4 if field == "gpu_count" else A100)
        ]
        for field, x in {
            "cpu": "7",
            "memory": "60Gi",
            "gpu_count": 4,
            "gpu_models": ["H100", "H200"],
            "min_gpu_memory_gb": 70,
        }.items()
    },
}


@pytest.mark.parametrize("field", PAIRS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_field_is_rendered_or_refused_or_told(backend: str, field: str) -> None:
    options, render = BACKENDS[backend]
    limits = sys.modules[type(options).__module__].SUPPORTS
    for without, with_it in PAIRS[field]:
        assert optional_fields(with_it)[field]
        try:
            options.check(with_it)
            rendered = render(with_it, options)
        except ValidationError:
            continue
        is_told = field in unsupported_fields(with_it, limits, options)
        has_effect = rendered != render(without, options)
        # Of several models the first is taken.
        assert is_told != has_effect or (field == "gpu_models" and is_told)


def test_every_field_that_may_be_told_is_tried() -> None:
    everything = replace(
        PLAIN,
        image="i",
        resources=replace(A100, cpu="1", memory="1Gi", min_gpu_memory_gb=1),
        provider_filter=ProviderFilter(exclude=["p"]),
        topology_spread="pack",
        bench=BenchSpec(mode="on-start"),
        stall_s=60.0,
    )
    # Stalls are seen by the executor, not by what it submits.
    assert set(optional_fields(everything)) == {*PAIRS, "stall_s"}
    assert optional_fields(PLAIN) == {}


def test_the_line_has_fields_values_and_reasons() -> None:
    spec = replace(PLAIN, image="x:1", resources=Resources(cpu="2", gpu_models=["A", "B"]))
    shared = [ignore(field, "shared") for field in ("cpu", "memory", "gpu_models")]
    limits = [ignore("image", "no"), *shared]
    told = "here does not support image x:1: no; nor cpu 2, gpu_models A, B: shared"
    assert describe_unsupported("here", unsupported_fields(spec, limits, None)) == told
    assert describe_unsupported("here", unsupported_fields(PLAIN, limits, None)) == ""
