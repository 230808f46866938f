from __future__ import annotations

from typing import Any

import modal
import pytest

from atoll.backends.modal.options import Bucket, ModalOptions
from atoll.core.config import options_of
from atoll.core.errors import ValidationError
from atoll.core.spec import (
    BenchSpec,
    ProviderFilter,
    RendezvousSpec,
    Resources,
    TrainingSpec,
    WorldSize,
)

GOOD = {
    "app": "runs",
    "store": "s3://bucket/runs",
    "image": "ghcr.io/me/train:1",
    "secrets": ["aws", "wandb"],
    "volumes": {"/data": "imagenet"},
    "buckets": {"/in": {"bucket": "b", "prefix": "p/", "secret": "aws"}},
    "region": ["us-east", "eu"],
    "gpu": "H100",
    "cpu": 2.0,
    "memory": 4096,
    "lifetime_s": 3600,
}


def spec(**fields: Any) -> TrainingSpec:
    given: dict[str, Any] = {
        "name": "t",
        "command": ["true"],
        "world_size": WorldSize(min=1, target=2, max=2),
        "rendezvous": RendezvousSpec(uri="s3://bucket/run"),
    }
    return TrainingSpec(**given | fields)


def test_a_table_of_the_configuration_is_read() -> None:
    options = options_of(ModalOptions, GOOD)
    assert options.buckets["/in"] == Bucket(bucket="b", prefix="p/", secret="aws")
    options.check(spec())


@pytest.mark.parametrize(
    ("table", "field"),
    [
        ({"app": "my app"}, "app"),
        ({"app": "x" * 65}, "app"),
        ({"environment": ""}, "environment"),
        ({"store": "file:///tmp/x"}, "store"),
        ({"store": "memory://x"}, "store"),
        ({"store": "s3://"}, "store"),
        ({"image": "two words"}, "image"),
        ({"image": 7}, "image"),
        ({"secrets": ["a b"]}, "secrets[0]"),
        ({"secrets": "aws"}, "secrets"),
        ({"volumes": {"data": "v"}}, "volumes"),
        ({"volumes": {"/root": "v"}}, "volumes"),
        ({"volumes": {"/tmp": "v"}}, "volumes"),
        ({"volumes": {"/a/../b": "v"}}, "volumes"),
        ({"volumes": {"/a": "v", "/b": "v"}}, "volumes./b"),
        ({"volumes": {"/a": "v v"}}, "volumes./a"),
        ({"volumes": {"/a": "v"}, "buckets": {"/a": Bucket(bucket="b")}}, "buckets"),
        ({"buckets": {"/a": Bucket(bucket="")}}, "buckets./a.bucket"),
        ({"buckets": {"/a": Bucket(bucket="b", prefix="p")}}, "buckets./a.prefix"),
        ({"buckets": {"/a": Bucket(bucket="b", requester_pays=True)}}, "buckets./a.requester_pays"),
        ({"buckets": {"/a": "b"}}, "buckets./a"),
        ({"region": ""}, "region"),
        ({"region": []}, "region"),
        ({"region": [""]}, "region[0]"),
        ({"gpu": "H1000"}, "gpu"),
        ({"cpu": 0.1}, "cpu"),
        ({"memory": 64}, "memory"),
        ({"lifetime_s": 86_401}, "lifetime_s"),
        ({"lifetime_s": 5}, "lifetime_s"),
        ({"creates": 0}, "creates"),
        ({"python": ""}, "python"),
    ],
)
def test_what_modal_would_refuse_is_refused(table: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError) as refused:
        ModalOptions(**table)
    assert refused.value.field == field


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(ValidationError, match="did you mean 'secrets'"):
        options_of(ModalOptions, {"secret": ["aws"]})


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"rendezvous": RendezvousSpec()}, "rendezvous_uri"),
        ({"rendezvous": RendezvousSpec(uri="file:///shared")}, "rendezvous_uri"),
        ({"rendezvous": RendezvousSpec(backend="etcd-v2", uri="s3://b")}, "rendezvous_backend"),
        ({"rendezvous": RendezvousSpec(backend="static", uri="s3://b")}, "rendezvous_backend"),
        ({"mesh": True}, "mesh"),
        ({"bench": BenchSpec(mode="on-start")}, "bench"),
        ({"provider_filter": ProviderFilter(include=["aws"])}, "provider_filter"),
        ({"env": {"MODAL_TOKEN_ID": "x"}}, "env.MODAL_TOKEN_ID"),
        ({"image": "a b"}, "image"),
        ({"resources": Resources(cpu="10m")}, "cpu"),
        ({"resources": Resources(memory="64Mi")}, "memory"),
        ({"resources": Resources(gpu_count=1)}, "gpu_count"),
        ({"resources": Resources(gpu_count=9, gpu_models=["H100"])}, "gpu_count"),
        ({"resources": Resources(gpu_count=5, gpu_models=["A10G"])}, "gpu_count"),
        ({"resources": Resources(gpu_count=1, gpu_models=["V100"])}, "gpu_models"),
        ({"resources": Resources(gpu_models=["H100"])}, "gpu_models"),
        (
            {"resources": Resources(gpu_count=1, gpu_models=["L4"], min_gpu_memory_gb=40)},
            "min_gpu_memory_gb",
        ),
    ],
)
def test_a_training_that_can_never_run_there_is_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError) as refused:
        ModalOptions().check(spec(**fields))
    assert refused.value.field == field


def test_records_are_in_the_store_of_the_executor_or_beside_the_rendezvous() -> None:
    assert ModalOptions(store="s3://bucket/runs").store_of(spec()) == "s3://bucket/runs"
    assert ModalOptions().store_of(spec()) == "s3://bucket/run"


def test_an_image_may_be_an_object_of_the_client() -> None:
    ModalOptions(image=modal.Image.debian_slim()).check(spec())


@pytest.mark.parametrize(
    ("needs", "default", "name"),
    [
        ({}, "H100", None),
        ({"gpu_count": 1, "gpu_models": ["H100"]}, None, "H100"),
        ({"gpu_count": 8, "gpu_models": ["h200"]}, None, "H200:8"),
        ({"gpu_count": 2, "gpu_models": ["A10G"]}, None, "A10:2"),
        ({"gpu_count": 2}, "B200", "B200:2"),
        ({"gpu_count": 1, "gpu_models": ["A100"], "min_gpu_memory_gb": 80}, None, "A100-80GB"),
        ({"gpu_count": 1, "gpu_models": ["A100"], "min_gpu_memory_gb": 40}, None, "A100"),
    ],
)
def test_gpus_in_modals_words(needs: dict[str, Any], default: str | None, name: str) -> None:
    assert ModalOptions(gpu=default).hardware_of(spec(resources=Resources(**needs))) == name
