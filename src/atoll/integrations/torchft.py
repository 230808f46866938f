"""A manager for `torchft.local_sgd.DiLoCo` and `LocalSGD`, unmodified, over an object store.

torchft asks for one all-reduce a parameter. The manager collects them: all that belong to one
synchronisation become one round, as soon as the fragment is complete or on the first wait. The
outer optimiser is torchft's, so rounds cannot be replayed for it: a checkpoint holds all registered
states, and a replica joins at a checkpoint that no round has followed yet.
"""

from __future__ import annotations

import io
import logging
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from atoll.core.checks import check_int
from atoll.core.errors import NotFound, Temporary, ValidationError
from atoll.diloco.allreduce import AllReduceReport, ObjectStoreAllReduce
from atoll.diloco.codecs import get_codec
from atoll.diloco.own_state import seal, unseal
from atoll.diloco.replica_config import find_replica_config, read_run_id
from atoll.diloco.round.objects import parse_round
from atoll.objectstore import ObjectStore

if TYPE_CHECKING:
    import torch

log = logging.getLogger("atoll.diloco")

FRAGMENT = "StreamingDiLoCoFragment_"  # what torchft's DiLoCo calls its states
_POLL_S = 0.1
_FIRST_RANK_S = 10.0  # how long the others leave it to rank 0 to say where all start
_MAX_CHECKPOINTS = 2
_NOTHING = 1e-12  # the weight of a replica that has nothing to add yet


class ObjectStoreManager:
    """What torchft's algorithms need of a `Manager`; there is no lighthouse and no process group.

    Rank, world and store come from the environment where they are not given. `state_dict` and
    `load_state_dict` cover the model and the inner optimiser, as in torchft: all replicas start
    from the first one's state, and a later one from the newest checkpoint in the store.
    """

    _use_async_quorum = False  # torchft's DiLoCo asks for this

    def __init__(
        self,
        *,
        state_dict: Callable[[], Any] | None = None,
        load_state_dict: Callable[[Any], None] | None = None,
        uri: str | ObjectStore | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        min_replicas: int | None = None,
        run_id: str | None = None,
        codec: str = "fp32",
        timeout: float = 600.0,
        grace_s: float | None = None,
        checkpoint_every: int = 5,
    ) -> None:
        check_int("checkpoint_every", checkpoint_every, 1, 10**9)
        self._config = find_replica_config(uri, rank, world_size, min_replicas)
        self._run = read_run_id(run_id)
        self._options: dict[str, Any] = {
            **{"codec": codec, "timeout_s": timeout, "grace_s": grace_s},
            "min_replicas": min_replicas,
        }
        self._checkpoint_every = checkpoint_every
        self._reducers: dict[int, ObjectStoreAllReduce] = {}
        self._healer = Healer(self._run, self._config.rank, timeout, self._reducer)
        if state_dict is not None and load_state_dict is not None:
            self.register_state_dict_fn("default", load_state_dict, state_dict)
        self._step = 0
        self._has_joined = self._is_healing = self._is_checkpoint_due = False
        self._has_missed = False
        self._sizes: dict[int, list[int]] = {}
        self._handed: list[int] = []  # elements of each tensor of this synchronisation so far
        self._batch: _Batch | None = None
        self.last_round: AllReduceReport | None = None

    def register_state_dict_fn(
        self, key: str, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Any]
    ) -> None:
        self._healer.register(key, load_state_dict, state_dict)

    def start_quorum(self, *_: Any, **__: Any) -> None:
        """Load the state of the others where needed; each round decides who takes part."""
        if self._config.uri is None:
            return
        self._is_healing = self._has_missed = False
        if not self._has_joined:
            self._step, self._is_healing = self._healer.join(self._step)
            self._has_joined = True

    def wait_quorum(self) -> None:
        return

    def current_step(self) -> int:
        return self._step

    def num_participants(self) -> int:
        return len(self.last_round.members) if self.last_round else 1

    def participating_rank(self) -> int | None:
        return self._config.rank

    def is_participating(self) -> bool:
        return not self._is_healing

    def allow_state_dict_read(self) -> None:
        return

    def disallow_state_dict_read(self) -> None:
        """torchft calls this before an inner step, so the outer step of a round is done by then."""
        self._save_if_due()

    def shutdown(self, wait: bool = True) -> None:
        if wait and self._batch is not None:
            self._batch.finish()
        self._save_if_due()
        for reducer in self._reducers.values():
            reducer.close()

    def state_dict(self) -> dict[str, int]:
        return {"step": self._step}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self._step = state_dict["step"]

    def allreduce(
        self, tensor: torch.Tensor, should_quantize: bool = False, *_: Any, **__: Any
    ) -> _Work:
        """`tensor` holds the mean over the manifest once the work has been waited for.

        The codec of this manager decides what travels, whatever `should_quantize` says.
        """
        codec = get_codec(self._options["codec"])
        if should_quantize and codec.is_exact:
            log.warning(
                "should_quantize is set, but the codec is %s: nothing is quantised", codec.name
            )
        sizes = self._fragment_sizes()
        self._handed.append(tensor.numel())
        if sizes:
            check_handed(sizes, self._handed)
        if self._batch is None or self._batch.is_started:
            self._batch = _Batch(self._reduce)
        batch = self._batch
        work = batch.add(tensor)
        if sizes and sum(self._handed) >= sum(sizes):
            batch.start()
        return work

    def should_commit(self, *_: Any, **__: Any) -> bool:
        """True once the round is committed; an error of the round is raised, not swallowed.

        False if the run had a round before it that this replica's state does not have: torchft
        keeps that state then, and the next quorum loads one that has all rounds.
        """
        if self._batch is not None:
            self._batch.finish()
            self._batch = None
        self._handed.clear()
        if self._has_missed:
            return False
        self._step += 1
        report = self.last_round
        if report is not None and self._step % self._checkpoint_every == 0:
            self._is_checkpoint_due = next(iter(report.members)) == self._config.rank
        return True

    def _save_if_due(self) -> None:
        if self._is_checkpoint_due:
            self._is_checkpoint_due = False
            self._healer.save(self._step)

    def _reduce(self, tensors: Sequence[torch.Tensor]) -> None:
        import torch

        if self._config.uri is None:
            return
        turn = self._turn()
        reducer = self._reducer(turn)
        values = [each.detach() for each in tensors]
        if self._is_healing:
            values = [torch.zeros_like(each) for each in values]
        means = reducer.allreduce(values, weight=_NOTHING if self._is_healing else 1.0)
        with torch.no_grad():
            for tensor, mean in zip(tensors, means, strict=True):
                tensor.copy_(mean)
        self.last_round = report = reducer.last_round
        assert report is not None
        # A replica that was late asks the store before its next round: others may be further.
        self._has_missed = report.round != self._healer.rounds.get(turn, 0)
        self._has_joined = report.is_member and not self._has_missed
        if not self._has_missed:
            self._healer.rounds[turn] = report.round + 1

    def _turn(self) -> int:
        return self._step % max(1, len(self._healer.fragments()))

    def _reducer(self, at: int) -> ObjectStoreAllReduce:
        """The all-reduce of fragment `at`.

        Each has rounds of its own, so that a replica that lags never mixes up fragments.
        """
        if at not in self._reducers:
            assert self._config.uri is not None
            self._reducers[at] = ObjectStoreAllReduce(
                self._config.uri,
                self._config.rank,
                self._config.world_size,
                run_id=f"{self._run}.torchft-{at}",
                **self._options,
            )
        return self._reducers[at]

    def _fragment_sizes(self) -> list[int]:
        """How many elements each parameter of the fragment in turn has; empty if not known."""
        if not self._healer.fragments():
            return []
        at = self._turn()
        if at not in self._sizes:
            tensors = self._healer.parameters(at)
            self._sizes[at] = [each.numel() for each in tensors.values()]
        return self._sizes[at]


class _Batch:
    """The tensors of one round; they are reduced once, when the first caller asks."""

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
        # torchft's callbacks read variables of the loop that creates them: one that runs after
        # the loop went on would unpack another bucket. So an incomplete batch is reduced at once.
        if not self._batch.is_started:
            self._batch.finish()
        return self._future


def check_handed(sizes: Sequence[int], handed: Sequence[int]) -> None:
    """Raises ValidationError where torchft's bucketisation would silently leave tensors out.

    It cuts `sum(sizes)` elements into buckets as large as the first, and a tensor that does not fit
    the rest of its bucket is in none. Nothing is lost where each parameter comes by itself.
    """
    if list(handed) == list(sizes[: len(handed)]):
        return
    total, packed = sum(sizes), sum(_packed(sizes, handed[0]))
    if packed < total:
        raise ValidationError(
            "use_bucketization",
            True,
            f"torchft would not reduce {total - packed} of {total} elements; turn it off: this "
            "manager sends all tensors as one object anyway",
        )


def _packed(sizes: Sequence[int], bucket: int) -> Iterator[int]:
    """The sizes of the tensors that torchft puts into buckets of `bucket` elements."""
    at, left = 0, sum(sizes)
    while left > 0:
        room = capacity = min(bucket, left)
        while at < len(sizes) and sizes[at] <= room:
            room -= sizes[at]
            yield sizes[at]
            at += 1
        left -= capacity


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
