"""`SageMakerExecutor`: replicas from a script, found again by another process."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll import NotFound, ReplicaHandle, SageMakerExecutor, ServerlessExecutor, ValidationError
from tests.allreduce.s3server import S3Server
from tests.support.sagemaker_stand_in import ROLE, SageMakerStandIn, why_no_mounts


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[SageMakerStandIn]:
    if why := why_no_mounts():
        pytest.skip(f"jobs need a /opt/ml of their own: {why}")
    aws = S3Server()
    aws.make_bucket("runs")
    made = SageMakerStandIn(aws.url, {**aws.environment, "AWS_EC2_METADATA_DISABLED": "true"})
    for name, value in {**aws.environment, **made.environment}.items():
        monkeypatch.setenv(name, value)
    yield made
    made.close()
    aws.stop()


def executor(**options: Any) -> SageMakerExecutor:
    given = {"role": ROLE, "store": f"s3://runs/{uuid.uuid4().hex}", "poll_s": 0.15}
    return SageMakerExecutor("train:1", **{**given, "python": sys.executable, **options})


def test_replicas_are_launched_followed_by_another_process_and_removed(
    service: SageMakerStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.py").write_text("NAME = 'a model'")
    (tmp_path / "train.py").write_text(
        "import os, sys, model\nprint(model.NAME, sys.argv[1:], os.environ['LR'])\n"
        "sys.exit(4 if os.environ['RANK'] == '1' else 0)\n"
    )
    monkeypatch.chdir(tmp_path)
    store = f"s3://runs/{uuid.uuid4().hex}"
    first = executor(store=store)
    assert isinstance(first, ServerlessExecutor)
    handles = first.launch_replicas(2, "train.py", {"lr": 0.1}, timeout=600)
    texts = [handle.to_json() for handle in handles]
    other = executor(store=store)
    found = [ReplicaHandle.from_json(text) for text in texts]
    reports = other.collect(found, timeout=60)
    assert [(r["rank"], r["status"], r["exit_code"]) for r in reports] == [
        (0, "succeeded", 0),
        (1, "failed", 4),
    ]
    assert other.stream_logs(found[0]) == "a model ['--lr', '0.1'] 0.1"
    assert other.attach(handles[0].metadata["job_name"]) == found
    first.close()
    with pytest.raises(NotFound):
        executor(store=store).attach(handles[0].metadata["job_name"])


def test_arguments_are_checked_by_their_names() -> None:
    for options, words in (
        ({"role": None}, "role: None.*ARN"),
        ({"store": None}, "store: None.*s3://"),
        ({"store": "/tmp"}, "store: '/tmp'"),
        ({"code": 1}, "code: 1.*True or False"),
        ({"instance_typ": "x"}, "instance_typ.*did you mean 'instance_type'"),
    ):
        with pytest.raises(ValidationError, match=words):
            executor(**options)
    with pytest.raises(ValidationError, match="image: None"):
        SageMakerExecutor(role=ROLE, store="s3://runs/x")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"role": "trainer"}, "role: 'trainer'"),
        ({"instance_type": "ml.nope"}, "instance_type: 'ml.nope'"),
        ({"tags": {f"k{at}": "v" for at in range(51)}}, "tags"),
        ({"tags": {"k": "v" * 257}}, "tags"),
        ({"env": {"A": "x" * 513}}, "env"),
        ({"warm_pool_s": 30_000}, "warm_pool_s: 30000"),
        ({"subnets": ["sub net"], "security_groups": ["sg-1"]}, "subnets"),
        ({"kms_key": "k" * 3000}, "kms_key"),
    ],
    ids=["role", "instance", "tags", "tag", "env", "pool", "subnets", "key"],
)
def test_what_sagemaker_would_refuse_is_refused_by_name_before_anything_is_made(
    options: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody listens at this address: a request would fail in another way."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(ValidationError, match=words):
        executor(code=False, **options).launch_replicas(1, __file__)
