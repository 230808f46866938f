"""vLLM's workers load versions by number: the weight transfer backend `atoll`.

vLLM finds it by the entry point `vllm.general_plugins`. Start the server with
`--weight-transfer-config '{"backend": "atoll"}'`, initialise it with `{"uri": "s3://bucket/policy"}`
and update it with `{"number": 42}`: all workers of an engine load the same version.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from atoll.core.errors import NotFound

# A worker waits so long for a version that was committed before it was asked for: the time to read
# some hundred GB at 1 GB/s.
TIMEOUT_S = 600.0


def register() -> None:
    """Make the backend known to vLLM, in each of its processes."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if "atoll" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("atoll", engine_class())


@cache
def engine_class() -> type[Any]:
    """The engine, a subclass of vLLM's own; made when vLLM is there."""
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )

    @dataclass
    class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
        uri: str
        name: str | None = None

    @dataclass
    class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
        number: int
        timeout: float = TIMEOUT_S

    class AtollEngine(WeightTransferEngine):  # type: ignore[misc]
        """Follows a channel; weights come in the format of checkpoints."""

        init_info_cls = InitInfo
        update_info_cls = UpdateInfo

        def init_transfer_engine(self, init_info: InitInfo) -> None:
            from atoll.weights import Follower

            self.shutdown()
            self.follower = Follower(init_info.uri, name=init_info.name)

        def start_weight_update(self) -> None:
            from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

            initialize_layerwise_reload(self.model)

        def receive_weights(self, update_info: UpdateInfo) -> None:
            number = update_info.number
            if self.follower.next(timeout=update_info.timeout, number=number) is None:
                raise NotFound("version", str(number))
            self.model.load_weights(self.follower.tensors().items())

        def finish_weight_update(self) -> None:
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

            finalize_layerwise_reload(self.model, self.model_config)

        def shutdown(self) -> None:
            if follower := getattr(self, "follower", None):
                follower.close()

    return AtollEngine
