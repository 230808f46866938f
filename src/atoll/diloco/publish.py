"""The global parameters as versions of a weight channel, uploaded by all replicas together.

Who is in a round, and by which names, the manifest says; the protocol is `weights/replicas.py`.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterable
from typing import Any, Protocol, TypeVar

from atoll.core.checks import check_timeout
from atoll.core.errors import NotFound, ValidationError
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


def publish(
    weights: RoundWeights[Any, V],
    complete: FullModel,
    timeout: float,
    group: Processes,
    store: ObjectStore | None,
    run: str,
    rounds: RoundDriver | LocalRounds,
) -> V | None:
    """Publish the parameters of the model; all processes of the replica call it together."""
    check_timeout(timeout)
    if not hasattr(weights, "take"):
        expected = "expected an atoll.weights.ReplicaPublisher"
        raise ValidationError("weights", type(weights).__name__, expected)
    tensors = ((entry.name, complete.tensor(entry)) for entry in complete.parameters)
    taken: list[Any] = []

    def take() -> None:
        if group.process:
            deque(tensors, maxlen=0)  # all processes bring each of them together
        else:
            taken.append(weights.take(tensors))

    gather(group, take)

    def send() -> V | None:
        last = rounds.state.last
        name = rounds.name if isinstance(rounds, LocalRounds) else _find_name(store, run)
        members = [parse_upload(each.upload) for each in last.present] if last else []
        return weights.publish(
            taken[0],
            run=name,
            who=name if isinstance(rounds, LocalRounds) else rounds.config.nonce,
            members=tuple(member.nonce for member in members if member),
            round=rounds.state.round,
            step=rounds.state.steps,
            timeout=timeout,
        )

    return from_leader(group, send)


def _find_name(store: ObjectStore | None, run: str) -> str:
    """A random name of the run, in its folder: another run of the same id has another."""
    assert store is not None
    key, name = f"{run}/weights", secrets.token_hex(8)
    try:
        return bytes(store.get(key)).decode()
    except NotFound:
        is_new = store.create(key, name.encode())
        return name if is_new else bytes(store.get(key)).decode()
