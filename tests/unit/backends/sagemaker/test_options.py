"""What may be said about SageMaker, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.backends.sagemaker.options import InputChannel, SageMakerOptions
from atoll.core.config import options_of
from atoll.core.errors import ValidationError


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
    with pytest.raises(ValidationError, match="mode"):
        InputChannel(uri="s3://b", mode="Slow")  # type: ignore[arg-type]
