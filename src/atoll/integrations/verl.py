"""verl's rollouts receive weights through a bucket: the checkpoint engine `atoll`.

    actor_rollout_ref.rollout.checkpoint_engine.backend=atoll
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=atoll.integrations.verl
    +actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.atoll.uri=s3://bucket/policy

Importing this module registers it, if verl is there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator
from functools import cache
from typing import TYPE_CHECKING, Any

from atoll.core.errors import ValidationError

if TYPE_CHECKING:
    import torch

POLL_S = 1.0  # a wait in a thread is cut into pieces, so that a cancelled receive ends


@cache
def engine_class() -> type[Any]:
    """The engine, a subclass of verl's own and registered there."""
    from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

    @CheckpointEngineRegistry.register("atoll")
    class AtollCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
        """The master publishes; every rollout worker follows for itself."""

        def __init__(
            self, bucket_size: int = 0, is_master: bool = False, uri: str = "", **options: Any
        ) -> None:
            if not uri:
                raise ValidationError("engine_kwargs.atoll.uri", uri, "expected a URI of a bucket")
            self.uri, self.is_master, self.options = uri, is_master, options
            self.publisher: Any = None
            self.follower: Any = None

        def prepare(self) -> dict[str, Any]:
            return {}

        @classmethod
        def build_topology(
            cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
        ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
            actors = [rank == 0 for rank in range(actor_wg_world_size)]
            return {"is_sender": actors}, {"is_sender": [False] * rollout_world_size}

        def init_process_group(self, is_sender: bool = False, **others: Any) -> None:
            self.is_master = is_sender

        def finalize(self) -> None:
            pass

        async def send_weights(
            self,
            weights: Generator[tuple[str, torch.Tensor], None, None],
            global_steps: int | None = None,
        ) -> None:
            """Publish, on this thread: each step of `weights` may be a collective."""
            from atoll.weights import Publisher

            if not self.is_master:
                for _ in weights:
                    pass
                return
            if self.publisher is None:
                self.publisher = Publisher(self.uri, **self.options)
            self.publisher.publish(weights, step=global_steps)

        async def receive_weights(
            self, global_steps: int | None = None
        ) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
            """Wait for the version of this step, or for a newer one than before."""
            from atoll.weights import Follower

            if self.follower is None:
                self.follower = Follower(self.uri)
            while True:
                version = await asyncio.to_thread(self.follower.next, POLL_S)
                version = version or (self.follower.version if global_steps is not None else None)
                if version is not None and global_steps in (None, version.step):
                    break
            for name, tensor in self.follower.tensors().items():
                yield name, tensor

    return AtollCheckpointEngine


try:
    engine_class()
except ImportError:
    pass  # without verl there is nothing to register with
