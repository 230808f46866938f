"""A manager for `torchft.local_sgd.DiLoCo` and `LocalSGD`, unmodified, over an object store.

torchft asks for one all-reduce a parameter. Here they are collected, and all that belong to one
synchronisation become one round: as soon as the fragment is complete, or on the first wait.
"""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from atoll.core.checks import check_int
from atoll.core.errors import Temporary, ValidationError
from atoll.worker.diloco import open_rounds
from atoll.worker.place import find_place
from atoll.worker.rounds import Agreed, Rounds

if TYPE_CHECKING:
    import torch

log = logging.getLogger("atoll.diloco")

_POLL_S = 0.2
_FRAGMENT = "StreamingDiLoCoFragment_"
_NOTHING = 1e-12  # the weight of a replica that has nothing to add yet


class ObjectStoreManager:
    """What torchft's algorithms need of a `Manager`; there is no lighthouse and no process group.

    Rank, world and store come from the environment where they are not given. `state_dict` and
    `load_state_dict` cover the model and the inner optimiser, as in torchft: with them, replicas
    start from the first one's state, and a later one from the newest checkpoint in the store.
    """

    _use_async_quorum = False  # torchft's DiLoCo asks for this

    def __init__(
        self,
        *,
        state_dict: Callable[[], Any] | None = None,
        load_state_dict: Callable[[Any], None] | None = None,
        uri: str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        min_replicas: int | None = None,
        codec: str = "fp32",
        checkpoint_every: int = 5,
        join_timeout: float = 600.0,
        allreduce: Any = None,
        rounds: Rounds | None = None,
    ) -> None:
        check_int("checkpoint_every", checkpoint_every, 1, 10**9)
        self._codec = codec
        self._rounds = rounds or open_rounds(
            find_place(uri, rank, world_size, min_replicas), codec, allreduce
        )
        self._checkpoint_every = checkpoint_every
        self._join_timeout = join_timeout
        self._load: dict[str, Callable[[Any], None]] = {}
        self._save: dict[str, Callable[[], Any]] = {}
        if state_dict is not None and load_state_dict is not None:
            self.register_state_dict_fn("default", load_state_dict, state_dict)
        self._step = self._round = 0
        self._has_joined = self._is_healing = self._is_checkpoint_due = False
        self._sizes: dict[int, list[int]] = {}
        self._batch: _Batch | None = None
        self.reports: list[Agreed] = []

    def register_state_dict_fn(
        self, key: str, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Any]
    ) -> None:
        self._load[key], self._save[key] = load_state_dict, state_dict

    def start_quorum(self, *_: Any, **__: Any) -> None:
        """Be where the others are; who takes part is decided round by round."""
        if self._is_checkpoint_due:
            self._is_checkpoint_due = False
            self._rounds.save(self._round, self._state)
        self._is_healing = False
        if not self._has_joined:
            self._join()
            self._has_joined = True

    def wait_quorum(self) -> None:
        return

    def current_step(self) -> int:
        return self._step

    def num_participants(self) -> int:
        return len(self.reports[-1].roster) if self.reports else 0

    def participating_rank(self) -> int | None:
        return self._rounds.rank

    def is_participating(self) -> bool:
        return True

    def allow_state_dict_read(self) -> None:
        return

    def disallow_state_dict_read(self) -> None:
        return

    def shutdown(self, wait: bool = True) -> None:
        if wait and self._batch is not None:
            self._batch.finish()

    def state_dict(self) -> dict[str, int]:
        return {"step": self._step}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self._step = state_dict["step"]

    def allreduce(
        self, tensor: torch.Tensor, should_quantize: bool = False, *_: Any, **__: Any
    ) -> _Work:
        """The mean over the roster will be in `tensor` once the work was waited for.

        The codec of this manager decides what travels, whatever `should_quantize` says.
        """
        if should_quantize and self._codec == "fp32":
            log.warning("should_quantize is set, but the codec is fp32: nothing is quantised")
        sizes = self._fragment_sizes()
        if self._batch is None or self._batch.is_started:
            self._batch = _Batch(self._reduce)
            check_buckets(sizes, tensor)
        batch = self._batch
        work = batch.add(tensor)
        if sum(sizes) and sum(each.numel() for each in batch.tensors) >= sum(sizes):
            batch.start()
        return work

    def should_commit(self, *_: Any, **__: Any) -> bool:
        """True once the round is committed; an error of the round is raised, not swallowed."""
        if self._batch is not None:
            self._batch.finish()
            self._batch = None
        self._step += 1
        agreed = self.reports[-1] if self.reports else None
        if agreed and agreed.roster[0] == self._rounds.rank:
            self._is_checkpoint_due = self._step % self._checkpoint_every == 0
        return True

    def _reduce(self, tensors: Sequence[torch.Tensor]) -> None:
        import torch

        scale = 0.0 if self._is_healing else 1.0
        arrays = [(each.detach() * scale).float().cpu().numpy() for each in tensors]
        agreed = self._rounds.reduce(self._round, arrays, _NOTHING if self._is_healing else 1.0)
        with torch.no_grad():
            for tensor, mean in zip(tensors, agreed.means, strict=True):
                tensor.copy_(torch.from_numpy(mean.copy()).view_as(tensor))
        self._round = agreed.round + 1
        # Left out: the others may be further by now, so ask the store before the next round.
        self._has_joined = self._rounds.rank in agreed.roster
        self.reports.append(agreed)

    def _join(self) -> None:
        """Load the newest checkpoint, unless that is what this replica already has."""
        deadline = time.monotonic() + self._join_timeout
        self._is_healing = False
        while True:
            round, state = self._rounds.start(self._state)
            if state is not None and (round > self._round or not self.reports):
                self._is_healing |= self._take(round, state)
            if next(iter(self._rounds.later(self._round)), None) is None:
                return
            # The outer optimiser is torchft's, so rounds cannot be replayed for it.
            if time.monotonic() > deadline:
                raise Temporary(f"no checkpoint as new as round {self._round} in the store")
            time.sleep(_POLL_S)

    def _state(self) -> bytes:
        import torch

        out = io.BytesIO()
        states = {key: save() for key, save in self._save.items()}
        torch.save({"step": self._step, "states": states}, out)
        return out.getvalue()

    def _take(self, round: int, data: bytes) -> bool:
        import torch

        found = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
        missing = set(self._load) ^ set(found["states"])
        if missing:
            raise ValidationError("checkpoint", sorted(missing), "only one side has these states")
        self._round, self._step = round, found["step"]
        if not self.reports and all(
            _same(found["states"][key], save())
            for key, save in self._save.items()
            if key.startswith(_FRAGMENT)
        ):
            return False
        for key, load in self._load.items():
            load(found["states"][key])
        return True

    def _fragment_sizes(self) -> list[int]:
        """How many elements each parameter of the fragment in turn has; empty if not known."""
        keys = [key for key in self._save if key.startswith(_FRAGMENT)]
        if not keys:
            return []
        at = self._step % len(keys)
        if at not in self._sizes:
            tensors = self._save[f"{_FRAGMENT}{at}"]()["original_parameters"].values()
            self._sizes[at] = [each.numel() for each in tensors]
        return self._sizes[at]


class _Batch:
    """The tensors of one round; reduced once, by whoever asks first."""

    def __init__(self, reduce: Callable[[Sequence[torch.Tensor]], None]) -> None:
        self._reduce = reduce
        self.tensors: list[torch.Tensor] = []
        self._futures: list[torch.futures.Future[Any]] = []
        self.is_started = False
        self._done = Event()
        self._error: BaseException | None = None

    def add(self, tensor: torch.Tensor) -> _Work:
        import torch

        self.tensors.append(tensor)
        self._futures.append(torch.futures.Future())
        return _Work(self, self._futures[-1])

    def start(self) -> None:
        if not self.is_started:
            self.is_started = True
            Thread(target=self._run, name="atoll-torchft-round", daemon=True).start()

    def finish(self) -> None:
        self.start()
        self._done.wait()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._reduce(self.tensors)
            for tensor, future in zip(self.tensors, self._futures, strict=True):
                future.set_result([tensor])  # callbacks run here, before anyone's wait returns
        except BaseException as error:
            self._error = error
        self._done.set()


class _Work:
    """torch.distributed's `Work`, as far as torchft's algorithms use it."""

    def __init__(self, batch: _Batch, future: torch.futures.Future[Any]) -> None:
        self._batch, self._future = batch, future

    def wait(self, timeout: Any = None) -> bool:
        self._batch.finish()
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        # torchft's callbacks read variables of the loop that makes them: a callback that runs
        # after the loop went on would unpack another bucket. So a part is reduced at once.
        if not self._batch.is_started:
            self._batch.finish()
        return self._future


def check_buckets(sizes: Sequence[int], first: torch.Tensor) -> None:
    """Refuse torchft's bucketisation where it would leave tensors out without a word.

    It cuts `sum(sizes)` elements into buckets as large as the first, but a tensor that does not
    fit the rest of its bucket is in none. Nothing is lost where each parameter comes by itself.
    """
    total, bucket = sum(sizes), first.numel()
    if not sizes or bucket == sizes[0] or bucket >= total:
        return
    packed = sum(_packed(sizes, bucket))
    if packed < total:
        raise ValidationError(
            "use_bucketization",
            True,
            f"torchft would not reduce {total - packed} of {total} elements (buckets of {bucket}); "
            "turn it off: this manager sends all tensors as one object anyway",
        )


def _packed(sizes: Sequence[int], bucket: int) -> Iterator[int]:
    at, left = 0, sum(sizes)
    while left > 0:
        room = capacity = min(bucket, left)
        while at < len(sizes) and sizes[at] <= room:
            room -= sizes[at]
            yield sizes[at]
            at += 1
        left -= capacity


def _same(one: Any, other: Any) -> bool:
    import torch

    mine, theirs = other["original_parameters"], one["original_parameters"]
    return mine.keys() == theirs.keys() and all(
        torch.equal(mine[name].cpu(), theirs[name]) for name in mine
    )
