"""TRL's asynchronous trainers publish their policy through a bucket.

    AsyncGRPOTrainer(…, weight_transfer=WeightTransfer("s3://bucket/policy", dtype=torch.bfloat16),
                     rollout_worker=…)

It is a `WeightTransferProtocol` of `trl.experimental.async_grpo`. Followers swap versions by
themselves, so there is nothing to pause or resume.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from atoll.core.errors import Temporary

if TYPE_CHECKING:
    import torch

    from atoll.weights import Publisher

log = logging.getLogger(__name__)


class WeightTransfer:
    """Publishes what the trainer sends; `options` are those of `atoll.weights.Publisher`.

    `step` of a version is the trainer's `model_version`, which counts the calls from 1.
    """

    def __init__(
        self, uri: str | os.PathLike[str], *, dtype: torch.dtype | None = None, **options: Any
    ) -> None:
        self._uri, self._options = uri, {"dtype": dtype, **options}
        self._publisher: Publisher | None = None
        self._step = 0

    def init_weight_transfer(self) -> None:
        from atoll.weights import Publisher

        if self._publisher is None:
            self._publisher = Publisher(self._uri, **self._options)

    def pause(self) -> None:
        pass

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.init_weight_transfer()
        assert self._publisher is not None
        self._step += 1
        try:
            self._publisher.publish(iterator, step=self._step)
        except Temporary as error:  # the next version has everything
            log.warning("no version was published: %s", error)

    def resume(self) -> None:
        pass

    def destroy(self) -> None:
        publisher, self._publisher = self._publisher, None  # another training makes another
        if publisher is not None:
            publisher.close()
