"""The state of a torchft training in the store, from which a replica joins.

The outer optimiser is torchft's, so rounds cannot be replayed for it: a checkpoint holds all
registered states, and a replica joins at a checkpoint that no round has followed yet.
"""

from __future__ import annotations

import io
import logging
import pickle
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from atoll.core.errors import NotFound, Temporary, ValidationError
from atoll.diloco.allreduce import ObjectStoreAllReduce
from atoll.diloco.own_state import seal, unseal
from atoll.diloco.round.objects import parse_round

if TYPE_CHECKING:
    import torch

log = logging.getLogger("atoll.diloco")

FRAGMENT = "StreamingDiLoCoFragment_"  # what torchft's DiLoCo calls its states
_POLL_S = 0.1
_FIRST_RANK_S = 10.0  # how long the others leave it to rank 0 to say where all start
_MAX_CHECKPOINTS = 2


class Healer:
    """Saves all registered states to the store, and loads them from it."""

    def __init__(
        self, run: str, rank: int, timeout: float, reducer: Callable[[int], ObjectStoreAllReduce]
    ) -> None:
        self._folder, self._rank, self._timeout = f"{run}.torchft", rank, timeout
        self._reducer = reducer
        self.rounds: dict[int, int] = {}  # of each fragment, that the state has
        self._load: dict[str, Callable[[Any], None]] = {}
        self._save: dict[str, Callable[[], Any]] = {}

    def register(self, key: str, load: Callable[[Any], None], save: Callable[[], Any]) -> None:
        self._load[key], self._save[key] = load, save

    def fragments(self) -> list[str]:
        return [key for key in self._save if key.startswith(FRAGMENT)]

    def parameters(self, at: int) -> dict[str, torch.Tensor]:
        """The global parameters of a fragment, in the order torchft reduces them."""
        state = self._save[f"{FRAGMENT}{at}"]()
        parameters: dict[str, torch.Tensor] = state["original_parameters"]
        return parameters

    def save(self, step: int) -> None:
        """Store the state before `step`, and delete all older ones but the last."""
        import torch

        out = io.BytesIO()
        states = {key: save() for key, save in self._save.items()}
        rounds = [self.rounds.get(at, 0) for at in range(self._streams())]
        torch.save({"step": step, "rounds": rounds, "states": states}, out)
        key = f"{self._folder}/{step:010d}"
        store = self._reducer(0).store
        store.create(key, seal(key, out.getbuffer()))
        checkpoints = [info.key for info in store.list(self._folder)]
        store.delete(checkpoints[:-_MAX_CHECKPOINTS])

    def join(self, step: int) -> tuple[int, bool]:
        """The step to go on with, and whether this replica loaded another state for it.

        Raises Temporary if no checkpoint as new as the rounds comes within the timeout.
        """
        started, is_healed = time.monotonic(), False
        while True:
            waited_s = time.monotonic() - started
            newest = self._newest()
            if newest is None:
                if self._rank == 0 or waited_s > _FIRST_RANK_S:
                    self.save(step)
                    continue
            else:
                if newest["step"] > step or (step == 0 and not is_healed):
                    step, is_healed = newest["step"], self._load_all(newest) or is_healed
                if self._is_newest_round():
                    return step, is_healed
            if waited_s > self._timeout:
                raise Temporary(f"no checkpoint as new as the rounds within {self._timeout:g} s")
            time.sleep(_POLL_S)

    def _streams(self) -> int:
        return max(1, len(self.fragments()))

    def _newest(self) -> dict[str, Any] | None:
        """The newest checkpoint that is whole, or None."""
        import torch

        store = self._reducer(0).store
        for info in reversed(store.list(self._folder)):
            try:
                body = unseal(info.key, store.get(info.key))
                checkpoint: dict[str, Any] = torch.load(
                    io.BytesIO(body), weights_only=True, map_location="cpu"
                )
                return checkpoint
            except (NotFound, ValueError, RuntimeError, pickle.UnpicklingError) as error:
                log.warning("checkpoint %s cannot be used: %s", info.key, error)
        return None

    def _load_all(self, checkpoint: dict[str, Any]) -> bool:
        """Load every state; False if this replica already has those global parameters."""
        import torch

        states = checkpoint["states"]
        only = sorted(set(self._load) ^ set(states))
        if only:
            raise ValidationError("state_dict", only, "the run's first replica differs in these")
        self.rounds = dict(enumerate(checkpoint["rounds"]))
        is_same = checkpoint["step"] == 0 and (bool(self.fragments()) or not states)
        for at, key in enumerate(self.fragments()):
            theirs, ours = states[key]["original_parameters"], self.parameters(at)
            is_same = is_same and all(torch.equal(theirs[name], ours[name].cpu()) for name in ours)
        if not is_same:
            for key, load in self._load.items():
                load(states[key])
        return not is_same

    def _is_newest_round(self) -> bool:
        """Whether no fragment has a committed round that the state does not have."""
        for at in range(self._streams()):
            reducer = self._reducer(at)
            listing = reducer.store.list(f"{reducer.run_id}/manifest")
            known = [parse_round(info.key.partition("/")[2]) for info in listing]
            if max((round + 1 for round in known if round is not None), default=0) > (
                self.rounds.get(at, 0)
            ):
                return False
        return True
