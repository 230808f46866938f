"""Replicas on SageMaker, launched from a script: `SageMakerExecutor`."""

from __future__ import annotations

from typing import Any

from atoll.backends.sagemaker.options import STORE, SageMakerOptions, check_installed
from atoll.core.config import options_of
from atoll.core.errors import ValidationError
from atoll.core.ports import Executor
from atoll.core.spec import TrainingSpec
from atoll.replicas.recorded import RecordedLaunches, RecordedReplicas


class SageMakerExecutor(RecordedReplicas):
    """Replicas as training jobs of one instance, one for each attempt of each.

    `image` has Python and `atoll[store]` (or `install="atoll[store]"` brings it); `role` is the ARN
    that jobs run as, `store` an S3 prefix with the records of all launches. Other `options` are
    those of `SageMakerOptions`. `command` runs exactly as it is, in the image; without it the code
    of the entrypoint is sent along, with the working directory unless `code` is False.
    `max_restarts`: how often each replica is restarted. Bad options raise ValidationError here.
    """

    backend_name = "sagemaker"
    supports_inter_replica_network = False
    _launch_noun = "set of training jobs"

    def __init__(
        self,
        image: str | None = None,
        *,
        role: str | None = None,
        store: str | None = None,
        command: list[str] | tuple[str, ...] | None = None,
        max_restarts: int = 0,
        allow_pickle: bool = False,
        code: bool = True,
        **options: Any,
    ) -> None:
        check_installed(type(self).__name__)
        self._take(command=command, max_restarts=max_restarts, allow_pickle=allow_pickle, code=code)
        for field, text, expected in (
            ("image", image, "expected an image: replicas run in containers"),
            ("role", role, "expected the ARN of the role that jobs run as"),
            ("store", store, STORE),
        ):
            if not isinstance(text, str) or not text:
                raise ValidationError(field, text, expected)
        values = options | {"image": image, "role": role, "store": store}
        self._options = options_of(SageMakerOptions, values)
        self.image = image
        self.role = role
        self.store = str(store).rstrip("/")
        self._address = {"store": self.store}

    def _check_launch(self, spec: TrainingSpec) -> None:
        from atoll.backends.sagemaker.executor import check_spec

        check_spec(spec, self._options, self._options.region or "")

    def _make_backend(self) -> Executor:
        from atoll.backends.sagemaker.executor import SageMakerBackend

        class ScriptTrainingJobs(RecordedLaunches, SageMakerBackend):
            """Training jobs of launches from scripts, which several processes may follow."""

        return ScriptTrainingJobs(self._options)
