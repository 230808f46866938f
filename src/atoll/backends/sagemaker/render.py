"""From a training, a rank and an attempt to the training job that is asked for. Pure."""

from __future__ import annotations

import math
import re
import shlex

from atoll.backends.base import UID, labels_of, wrapper_command
from atoll.backends.records import AttemptKey, Json
from atoll.backends.sagemaker.model import check_request
from atoll.backends.sagemaker.options import MAX_S, SageMakerOptions
from atoll.core.spec import TrainingSpec
from atoll.core.status import Training

TRAINING = "atoll-training"
# By which the end that SageMaker makes is after the one that atoll makes.
MARGIN_S = 300
# What callers call a part of a request.
NAMES = {
    "TrainingJobName": "name",
    "RoleArn": "role",
    "AlgorithmSpecification.TrainingImage": "image",
    "AlgorithmSpecification.ContainerEntrypoint": "store",
    "AlgorithmSpecification.ContainerArguments": "store",
    "ResourceConfig.InstanceType": "instance_type",
    "ResourceConfig.VolumeSizeInGB": "volume_gb",
    "ResourceConfig.VolumeKmsKeyId": "kms_key",
    "ResourceConfig.KeepAlivePeriodInSeconds": "warm_pool_s",
    "OutputDataConfig.KmsKeyId": "kms_key",
    "OutputDataConfig": "output",
    "VpcConfig.Subnets": "subnets",
    "VpcConfig.SecurityGroupIds": "security_groups",
    "StoppingCondition.MaxRuntimeInSeconds": "max_runtime_s",
    "StoppingCondition.MaxWaitTimeInSeconds": "max_wait_s",
    "CheckpointConfig.S3Uri": "checkpoints",
    "CheckpointConfig.LocalPath": "checkpoint_path",
    "Tags": "tags",
    "InputDataConfig": "channels",
    "Environment": "env",
}
_JOB = re.compile(r"atoll-([a-zA-Z0-9]+)-r(\d+)-a(\d+)(?:-t(\d+))?")


def stem_of(uid: str) -> str:
    """What the names of all jobs of a training begin with, and of no other."""
    return f"atoll-{re.sub('[^a-zA-Z0-9]', '', uid)[:32]}"


def job_name(uid: str, key: AttemptKey, number: int = 0) -> str:
    """The name is what makes a start harmless to repeat: SageMaker takes it once, for ever.

    `number` counts the starts of an attempt that ran nothing, for want of capacity.
    """
    rank, attempt = key
    return f"{stem_of(uid)}-r{rank}-a{attempt}" + (f"-t{number}" if number else "")


def read_name(name: str, uid: str) -> tuple[AttemptKey, int] | None:
    """The attempt and the start that a job is; None for what is none of this training."""
    match = _JOB.fullmatch(name)
    if match is None or f"atoll-{match[1]}" != stem_of(uid):
        return None
    return (int(match[2]), int(match[3])), int(match[4] or 0)


def render_job(
    training: Training,
    key: AttemptKey,
    options: SageMakerOptions,
    *,
    number: int = 0,
    region: str = "",
    endpoint: str = "",
) -> Json:
    """The CreateTrainingJob of one attempt: one instance, and never a retry of SageMaker's own."""
    spec = training.spec
    rank, attempt = key
    request: Json = {
        "TrainingJobName": job_name(training.uid, key, number),
        "RoleArn": options.role,
        "AlgorithmSpecification": {
            "TrainingImage": spec.image or options.image or "",
            "TrainingInputMode": "File",
            **_container(training, key, options),
        },
        "ResourceConfig": {
            "InstanceType": options.hardware_of(spec),
            "InstanceCount": 1,
            "VolumeSizeInGB": options.volume_gb,
        },
        # Not under the training's own prefix: models outlive it.
        "OutputDataConfig": {
            "S3OutputPath": options.output or f"{options.store_of(spec)}/output/{spec.name}"
        },
        "StoppingCondition": {"MaxRuntimeInSeconds": runtime_s(training, options)},
        "Environment": _environment(options, region, endpoint),
        "Tags": [
            {"Key": name, "Value": value}
            for name, value in {
                **options.tags,
                UID: training.uid,
                TRAINING: training.name,
                **labels_of(training.uid, key),
            }.items()
        ],
    }
    if options.kms_key is not None:
        request["OutputDataConfig"]["KmsKeyId"] = options.kms_key
        request["ResourceConfig"]["VolumeKmsKeyId"] = options.kms_key
    if options.warm_pool_s is not None:
        request["ResourceConfig"]["KeepAlivePeriodInSeconds"] = options.warm_pool_s
    if options.subnets:
        request["VpcConfig"] = {
            "Subnets": options.subnets,
            "SecurityGroupIds": options.security_groups,
        }
    if options.is_spot:
        request["EnableManagedSpotTraining"] = True
        longest = request["StoppingCondition"]["MaxRuntimeInSeconds"]
        request["StoppingCondition"]["MaxWaitTimeInSeconds"] = max(
            options.max_wait_s or longest, longest
        )
    if options.checkpoints is not None:
        request["CheckpointConfig"] = {
            "S3Uri": f"{options.checkpoints.rstrip('/')}/{training.name}/{rank}",
            "LocalPath": options.checkpoint_path,
        }
    if options.channels:
        request["InputDataConfig"] = [_channel(name, options) for name in options.channels]
    return request


def check_job(spec: TrainingSpec, options: SageMakerOptions) -> None:
    """Raises ValidationError for what SageMaker would refuse of the longest request of a spec."""
    longest = (spec.world_size.max - 1, spec.max_restarts)
    untried = Training(namespace="x", uid="0" * 32, spec=spec)
    request = render_job(untried, longest, options, region=options.region or "")
    check_request("CreateTrainingJob", request, NAMES)


def runtime_s(training: Training, options: SageMakerOptions) -> int:
    """After which SageMaker ends a job; atoll's own deadline comes first."""
    deadline_s = training.spec.deadline_s
    if deadline_s is None:
        return options.max_runtime_s
    planned = math.ceil(deadline_s + training.spec.stop_grace_s) + MARGIN_S
    return min(planned, MAX_S)


def _container(training: Training, key: AttemptKey, options: SageMakerOptions) -> Json:
    wrapper = wrapper_command(training, key, options)
    if options.install is None:
        return {"ContainerEntrypoint": wrapper[:3], "ContainerArguments": wrapper[3:]}
    python = shlex.quote(options.python)
    script = (
        f"{python} -c 'import atoll, obstore' 2>/dev/null || "
        f"{python} -m pip install -q {shlex.quote(options.install)} || exit 126; "
        f'exec {python} -m atoll.agent.wrapper "$@"'
    )
    return {"ContainerEntrypoint": ["sh", "-c", script, "sh"], "ContainerArguments": wrapper[3:]}


def _environment(options: SageMakerOptions, region: str, endpoint: str) -> dict[str, str]:
    """For the wrapper to find the store; what ranks are told is in the records."""
    found = {"AWS_REGION": region, "AWS_ENDPOINT_URL_S3": endpoint}
    return {**{name: value for name, value in found.items() if value}, **options.env}


def _channel(name: str, options: SageMakerOptions) -> Json:
    channel = options.channels[name]
    created: Json = {
        "ChannelName": name,
        "InputMode": channel.mode,
        "DataSource": {
            "S3DataSource": {
                "S3DataType": "S3Prefix",
                "S3Uri": channel.uri,
                "S3DataDistributionType": "FullyReplicated",
            }
        },
    }
    if channel.content_type is not None:
        created["ContentType"] = channel.content_type
    return created
