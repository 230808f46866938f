"""What SageMaker would refuse, by botocore's model."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.backends.sagemaker.model import check_request, flaws_of
from atoll.core.errors import ValidationError

GOOD: dict[str, Any] = {
    "TrainingJobName": "a-1",
    "AlgorithmSpecification": {"TrainingInputMode": "File", "TrainingImage": "i"},
    "RoleArn": "arn:aws:iam::123456789012:role/trainer",
    "OutputDataConfig": {"S3OutputPath": "s3://b/x"},
    "ResourceConfig": {"InstanceType": "ml.m5.large", "InstanceCount": 1, "VolumeSizeInGB": 1},
    "StoppingCondition": {"MaxRuntimeInSeconds": 60},
    "Tags": [{"Key": "team é", "Value": "a/b=c"}],
}


def test_a_good_request_has_no_flaws() -> None:
    assert list(flaws_of("CreateTrainingJob", GOOD)) == []


@pytest.mark.parametrize(
    ("change", "path", "words"),
    [
        ({"TrainingJobName": "bad name!"}, "TrainingJobName", "expected what fits"),
        ({"TrainingJobName": "a" * 64}, "TrainingJobName", "at most 63 characters, got 64"),
        ({"TrainingJobName": ""}, "TrainingJobName", "at least 1"),
        (
            {"ResourceConfig": {**GOOD["ResourceConfig"], "InstanceType": "ml.m5.nonesuch"}},
            "ResourceConfig.InstanceType",
            "expected one of SageMaker's: ml.m5.large, ",
        ),
        ({"RetryStrategy": {"MaximumRetryAttempts": 31}}, "RetryStrategy", "at most 30"),
        ({"Tags": [{"Key": "a", "Value": "b"}] * 51}, "Tags", "at most 50 entries"),
        ({"Tags": [{"Key": "a", "Value": "<"}]}, "Tags[0].Value", "expected what fits"),
        ({"Environment": {"A": "x" * 513}}, "Environment.A", "at most 512"),
        ({"StoppingCondition": {"MaxPendingTimeInSeconds": 5}}, "StoppingCondition", "1800"),
    ],
)
def test_what_botocore_lets_through_is_a_flaw(
    change: dict[str, Any], path: str, words: str
) -> None:
    flaw = next(flaws_of("CreateTrainingJob", GOOD | change))
    assert flaw.path.startswith(path)
    assert words in flaw.expected


def test_a_flaw_is_told_by_the_name_that_its_caller_knows() -> None:
    names = {"Tags": "tags", "ResourceConfig": "machine", "ResourceConfig.InstanceType": "kind"}
    bad = GOOD["ResourceConfig"] | {"InstanceType": "x"}
    with pytest.raises(ValidationError, match="kind: 'x'"):
        check_request("CreateTrainingJob", GOOD | {"ResourceConfig": bad}, names)
    bad = GOOD["ResourceConfig"] | {"VolumeSizeInGB": -1}
    with pytest.raises(ValidationError, match="machine: -1"):
        check_request("CreateTrainingJob", GOOD | {"ResourceConfig": bad}, names)
    with pytest.raises(ValidationError, match="TrainingJobName: '!'"):
        check_request("CreateTrainingJob", GOOD | {"TrainingJobName": "!"}, names)
    with pytest.raises(ValidationError, match="Missing required parameter.*RoleArn"):
        check_request("CreateTrainingJob", {k: GOOD[k] for k in GOOD if k != "RoleArn"}, names)
