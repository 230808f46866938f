"""What may be said about SageMaker, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.backends.sagemaker.options import InputChannel, SageMakerOptions
from atoll.core.config import options_of
from atoll.core.errors import ValidationError
from atoll.core.spec import Resources, TrainingSpec, WorldSize


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"store": "gs://b/x"}, "store: 'gs://b/x'.*expected s3://"),
        ({"store": "s3://"}, "store"),
        ({"output": "/tmp"}, "output: '/tmp'"),
        ({"subnets": ["subnet-1"]}, "security_groups.*expected subnets and security_groups"),
        ({"is_spot": True, "warm_pool_s": 60}, "warm_pool_s: 60.*expected none with is_spot"),
        ({"max_wait_s": 90_000}, "max_wait_s: 90000.*only with is_spot"),
        ({"is_spot": True, "max_wait_s": 60}, "max_wait_s: 60.*at least max_runtime_s"),
        ({"warm_pool_s": 30_000}, "warm_pool_s: 30000"),
        ({"max_runtime_s": 3_000_000}, "max_runtime_s: 3000000"),
        ({"tags": {"atoll-uid": "x"}}, "tags: 'atoll-uid'.*reserved"),
        ({"channels": {"train": "s3://b"}}, "channels.train.*InputChannel"),
        ({"channels": {"train": InputChannel(uri="/x")}}, "channels.train.uri: '/x'"),
        ({"checkpoint_path": "here"}, "checkpoint_path: 'here'"),
        ({"volume_gb": 0}, "volume_gb: 0"),
    ],
)
def test_bad_options_are_refused_by_their_names(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        SageMakerOptions(**options)


def test_a_table_of_the_file_is_read() -> None:
    table = {
        "role": "arn:aws:iam::123456789012:role/a",
        "store": "s3://bucket/runs",
        "is_spot": True,
        "channels": {"train": {"uri": "s3://bucket/data", "mode": "FastFile"}},
    }
    options = options_of(SageMakerOptions, table)
    assert options.channels["train"].mode == "FastFile"
    slow = InputChannel(uri="s3://bucket", mode="Slow")  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match="channels.train.mode"):
        SageMakerOptions(channels={"train": slow})


@pytest.mark.parametrize(
    ("needs", "words"),
    [
        (Resources(gpu_count=1), "gpu_count: 1.*instance_type"),
        (Resources(min_gpu_memory_gb=40), "min_gpu_memory_gb: 40.*gpu_models"),
    ],
)
def test_a_gpu_without_a_name_is_refused(needs: Resources, words: str) -> None:
    options = SageMakerOptions(role="r", image="i", store="s3://bucket/runs")
    spec = TrainingSpec(
        name="t", world_size=WorldSize(min=1, target=1, max=1), command=["true"], resources=needs
    )
    with pytest.raises(ValidationError, match=words):
        options.check(spec)
