"""Replicas on SageMaker, launched from a script: `SageMakerExecutor`."""

from __future__ import annotations

from typing import Any

from atoll.backends.sagemaker.options import SageMakerOptions
from atoll.replicas.recorded import StoreReplicas


class SageMakerExecutor(StoreReplicas):
    """Replicas as training jobs of one instance, one for each attempt of each.

    `image` has Python and atoll with its extra `store`, or `install` names a wheel of it. `role` is
    the ARN that jobs run as, `store` an S3 prefix with the records of all launches. Other
    `options` are those of `SageMakerOptions`. `command` runs exactly as it is, in the image;
    without it the code of the entrypoint is sent along, with the working directory unless `code`
    is False. `max_restarts`: how often each replica is restarted. Bad options raise
    ValidationError here.
    """

    backend_name = "sagemaker"
    _launch_noun = "set of training jobs"
    _options_type = SageMakerOptions
    _required = {
        "image": "expected an image: replicas run in containers",
        "role": "expected the ARN of the role that jobs run as",
        "store": "expected s3://bucket/prefix: where the records of ranks are",
    }

    def __init__(self, image: str | None = None, *, role: str | None = None, **more: Any) -> None:
        super().__init__(image, role=role, **more)
        self.role = role
