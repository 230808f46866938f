"""One stand-in for SageMaker, with one moto for its logs and for the ranks' records."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from tests.allreduce.s3server import S3Server
from tests.support.sagemaker_stand_in import SageMakerStandIn, why_no_mounts


@pytest.fixture(scope="session")
def aws() -> Iterator[S3Server]:
    server = S3Server()
    server.make_bucket("runs")
    yield server
    server.stop()


@pytest.fixture
def stand_in(aws: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[SageMakerStandIn]:
    if why := why_no_mounts():
        pytest.skip(f"jobs need a /opt/ml of their own: {why}")
    role = {**aws.environment, "AWS_EC2_METADATA_DISABLED": "true"}
    server = SageMakerStandIn(aws.url, role)
    for name, value in {**aws.environment, **server.environment}.items():
        monkeypatch.setenv(name, value)
    yield server
    server.close()


@pytest.fixture
def uri(aws: S3Server) -> str:
    return f"s3://runs/{uuid.uuid4().hex}"
