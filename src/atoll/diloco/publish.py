"""The global parameters as versions of a weight channel, uploaded by all replicas together.

Who is in a round, and by which names, the manifest says; the protocol is `weights/replicas.py`.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterable
from typing import Any, Protocol, TypeVar

from atoll.core.errors import NotFound
from atoll.diloco.export import FullModel
from atoll.diloco.group import Processes, from_leader, gather
from atoll.diloco.round.driver import RoundDriver
from atoll.diloco.round.objects import parse_upload
from atoll.diloco.setup import LocalRounds
from atoll.objectstore import ObjectStore

Taken = TypeVar("Taken")
V = TypeVar("V", covariant=True)


class RoundWeights(Protocol[Taken, V]):
    """What `DiLoCo.publish` publishes to: `atoll.weights.ReplicaPublisher`."""

    def take(self, named_tensors: Iterable[tuple[str, Any]]) -> Taken: ...

    def publish(
        self,
        values: Taken,
        *,
        run: str,
        who: str,
        members: tuple[str, ...],
        round: int,
        step: int,
        timeout: float,
    ) -> V | None: ...


class RunChannel:
    """What this replica is to the others of its run, where they publish."""

    def __init__(
        self,
        group: Processes,
        store: ObjectStore | None,
        run: str,
        rounds: RoundDriver | LocalRounds,
    ) -> None:
        self._group, self._store, self._run, self._rounds = group, store, run, rounds

    def publish(
        self, weights: RoundWeights[Any, V], complete: FullModel, timeout: float
    ) -> V | None:
        """Publish the parameters of the model; all processes of the replica call it together."""
        tensors = ((entry.name, complete.tensor(entry)) for entry in complete.parameters)
        taken: list[Any] = []

        def take() -> None:
            if self._group.process:
                deque(tensors, maxlen=0)  # all processes bring each of them together
            else:
                taken.append(weights.take(tensors))

        gather(self._group, take)

        def send() -> V | None:
            state, rounds = self._rounds.state, self._rounds
            name = self._find_name()
            uploads = [] if state.last is None else [each.upload for each in state.last.present]
            members = [parse_upload(upload) for upload in uploads]
            return weights.publish(
                taken[0],
                run=name,
                who=rounds.config.nonce if isinstance(rounds, RoundDriver) else name,
                members=tuple(member.nonce for member in members if member),
                round=state.round,
                step=state.steps,
                timeout=timeout,
            )

        return from_leader(self._group, send)

    def _find_name(self) -> str:
        """A random name of the run, in its folder: another run of the same id has another."""
        if isinstance(self._rounds, LocalRounds):
            return self._rounds.name
        assert self._store is not None
        key, name = f"{self._run}/weights", secrets.token_hex(8)
        try:
            return bytes(self._store.get(key)).decode()
        except NotFound:
            is_new = self._store.create(key, name.encode())
            return name if is_new else bytes(self._store.get(key)).decode()
