"""What is a replica's own, kept in the store: inner optimisers, random numbers, a script's extras.

inner/RANK/ROUND.STEP.NONCE.PROCESSES/PROCESS   one copy; process 0 writes when the others have

The same rank reads its newest copy when it comes again, with as many processes. Older copies are
deleted. Nothing in a copy is code: what is not tensors, numbers or text is refused.
"""

from __future__ import annotations

import io
import logging
import pickle
import random
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from atoll.core.errors import BackendError, NotFound, ValidationError
from atoll.diloco.group import Processes, from_leader, gather
from atoll.diloco.round import cells
from atoll.objectstore import ObjectStore

if TYPE_CHECKING:
    import torch

log = logging.getLogger("atoll.diloco")

MAX_COPIES = 2  # of each rank
Extras = Mapping[str, Any]

_KEY = re.compile(r"inner/(\d{5})/((\d{8})\.(\d{12})\.[0-9a-f]{16}\.(\d{1,5}))/(\d{1,5})")


class Unfit(Exception):
    """A copy that is not of this replica as it is: `str` says why."""


class OwnCopy(NamedTuple):
    """One copy in the store, of all processes of the replica."""

    round: int
    step: int
    name: str
    processes: int


class OwnState:
    """The copies of one rank. All processes of the replica call the same methods."""

    def __init__(
        self,
        store: ObjectStore,
        run: str,
        rank: int,
        group: Processes,
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        self._store, self._run, self._rank = store, run, rank
        self._group, self._optimizers = group, optimizers
        self._make: Callable[[], Extras] | None = None
        self._last: tuple[int, int] | None = None  # round and step of the newest copy made here
        self.is_retained = False
        self.restored: OwnCopy | None = None
        self.extras: Extras | None = None

    def keep(self, extras: Extras | Callable[[], Extras] | None) -> None:
        """Copies are made from here on. Raises ValidationError for extras that cannot be kept."""
        if extras is not None:
            self._make = extras if callable(extras) else lambda: extras
        self._packed_extras()
        self.is_retained = True

    def save(self, round: int, step: int) -> None:
        """The newest copy is of now. Raises what the store raises."""
        group = self._group
        nonce = from_leader(group, lambda: secrets.token_hex(8))
        name = f"{round:08d}.{step:012d}.{nonce}.{group.processes}"
        key = f"{self._run}/inner/{self._rank:05d}/{name}/{group.process}"

        def pack() -> list[bytes | memoryview]:
            body = _dumped(
                {
                    "optimizers": [_pack_optimizer(each) for each in self._optimizers],
                    "random": _random_state(),
                    "extras": self._packed_extras(),
                }
            )
            pieces = seal(key, body)
            if group.process:
                self._store.put(key, pieces)
            return pieces

        retained: list[list[bytes | memoryview]] = []
        gather(group, lambda: retained.append(pack()))
        from_leader(group, lambda: self._store.put(key, retained[0]))
        self._last = (round, step)
        from_leader(group, self._sweep)

    def save_if_retained(self, round: int, step: int) -> None:
        """As `save`, but a store that fails is only told of."""
        if not self.is_retained or self._last == (round, step):
            return
        try:
            self.save(round, step)
        except BackendError as error:
            log.warning("what is rank %d's own was not kept: %s", self._rank, error)

    def restore(self, round: int, *, keeps_groups: bool) -> list[str]:
        """The optimisers, random numbers and extras are those of the newest copy of this rank.

        `keeps_groups`: learning rates and the like stay as the script has them. Returns what to
        warn of: there is nothing to restore, though others, or other processes, have copies.
        """
        copies, others = from_leader(self._group, self._list)
        rank = self._rank
        reason = f"others have copies, rank {rank} has none" if others else "no copy was kept"
        for copy in reversed(copies):
            try:
                self.extras = self._load(copy, keeps_groups=keeps_groups)
            except Unfit as problem:
                reason = str(problem)
                continue
            self.restored = copy
            text = "inner optimiser and random numbers of rank %d as of round %d, step %d"
            log.info(text + "; the run is at round %d", rank, copy.round, copy.step, round)
            return []
        message = f"the inner optimiser of rank {rank} starts over in round {round}: {reason}"
        if copies or others:
            return [message]
        log.info("%s", message)
        return []

    def _load(self, copy: OwnCopy, *, keeps_groups: bool) -> Extras | None:
        if copy.processes != self._group.processes:
            raise Unfit(f"its copy is of {copy.processes} processes, not {self._group.processes}")

        def read() -> Any:
            key = f"{self._run}/inner/{self._rank:05d}/{copy.name}/{self._group.process}"
            try:
                return _loaded(unseal(key, self._store.get(key)))
            except (NotFound, ValueError, pickle.UnpicklingError, RuntimeError) as error:
                return f"its copy of step {copy.step} cannot be read: {error}"

        state = read()
        problem = next(filter(None, self._group.gather(_misfit(state, self._optimizers))), "")
        if problem:
            raise Unfit(problem)
        for optimizer, part in zip(self._optimizers, state["optimizers"], strict=True):
            _unpack_optimizer(optimizer, part, keeps_groups=keeps_groups)
        _set_random_state(state["random"])
        extras: Extras | None = None if state["extras"] is None else _loaded(state["extras"])
        return extras

    def _packed_extras(self) -> bytes | None:
        if self._make is None:
            return None
        extras = self._make()
        expected = "expected tensors, numbers, text, lists and dicts of them, by name"
        if not isinstance(extras, Mapping):
            raise ValidationError("extras", type(extras).__name__, expected)
        try:
            packed = bytes(_dumped(dict(extras)))
            _loaded(packed)
        except Exception as error:  # pickling what a script has may raise anything
            messages = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ValidationError("extras", sorted(extras), f"{expected}: {messages}") from error
        return packed

    def _list(self) -> tuple[list[OwnCopy], bool]:
        """The whole copies of this rank, oldest first, and whether other ranks have any."""
        copies, others = [], False
        for info in self._store.list(f"{self._run}/inner"):
            match = _KEY.search(info.key)
            if match is None:
                continue
            if int(match[1]) != self._rank:
                others = True
            elif match[6] == "0":  # the last part to be written
                copy = OwnCopy(int(match[3]), int(match[4]), match[2], int(match[5]))
                copies.append((copy.round, copy.step, info.modified, copy))
        return [each[-1] for each in sorted(copies)], others

    def _sweep(self) -> None:
        """Deletes older copies, and what is left of those that were never whole."""
        copies = self._list()[0][-MAX_COPIES:]
        names = {copy.name for copy in copies}
        doomed = [
            info.key
            for info in self._store.list(f"{self._run}/inner/{self._rank:05d}")
            if (match := _KEY.search(info.key)) and match[2] not in names
        ]
        try:
            self._store.delete(doomed)
        except BackendError as error:
            log.warning("old copies were not deleted, the next time they will be: %s", error)


def seal(key: str, body: memoryview) -> list[bytes | memoryview]:
    """The body behind a table of one cell: its checksum, and the place that it is for."""
    return [cells.pack_table(cells.place_of(key), [body]), body]


def unseal(key: str, data: memoryview) -> memoryview:
    """The body of a copy. Raises ValueError if it is damaged, or of another place."""
    size = cells.table_size(1)
    table = cells.unpack_table(cells.place_of(key), data[:size], 1)
    body = data[size:]
    if [body.nbytes] != list(table.lengths) or cells.checksum(body) != table.checksums[0]:
        raise ValueError("its checksum does not match")
    return body


def _dumped(state: Any) -> memoryview:
    import torch

    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getbuffer()


def _loaded(data: bytes | memoryview) -> Any:
    import torch

    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _parameters(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [value for group in optimizer.param_groups for value in group["params"]]


def _pack_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Its state, of which this process keeps what it holds: `cut` says of what that is a part.

    Raises ValidationError for a state that could not be read again.
    """
    state, kind = optimizer.state_dict(), type(optimizer).__name__
    cut: list[tuple[int, str]] = []
    entries: dict[Any, Any] = {}  # by parameter, beside what an optimiser has under other keys
    for at, values in state["state"].items():
        if isinstance(at, int) and isinstance(values, dict):
            values = dict(values)
            for name, value in values.items():
                if hasattr(value, "to_local"):
                    cut.append((at, name))
                    values[name] = value.to_local()
        entries[at] = values
    kept = {"state": entries, "param_groups": state["param_groups"]}
    return {"kind": kind, "state": _plain(kept, kind), "cut": cut}


def _plain(value: Any, where: str) -> Any:
    """The value in the types that a copy is read in: numbers of numpy are those of Python.

    Raises ValidationError for what is of another type.
    """
    import torch

    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {key: _plain(each, f"{where}[{key!r}]") for key, each in value.items()}
    if isinstance(value, list | tuple):
        items = [_plain(each, f"{where}[{at}]") for at, each in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    plain = torch.Tensor | torch.dtype | torch.device | str | bytes | int | float | complex | None
    if isinstance(value, plain):
        return value
    expected = f"expected tensors, numbers, text, lists and dicts of them at {where}"
    raise ValidationError("inner_optimizer", type(value).__name__, expected)


def _misfit(state: Any, optimizers: Sequence[torch.optim.Optimizer]) -> str:
    """Why the state is not of these optimisers; empty if it is."""
    if isinstance(state, str):
        return state
    theirs = [part["kind"] for part in state["optimizers"]]
    ours = [type(each).__name__ for each in optimizers]
    if theirs != ours:
        return f"its copy is of {', '.join(theirs)}, not {', '.join(ours)}"
    for optimizer, part in zip(optimizers, state["optimizers"], strict=True):
        groups = [len(group["params"]) for group in part["state"]["param_groups"]]
        if groups != [len(group["params"]) for group in optimizer.param_groups]:
            return f"its copy is of {groups} parameters in {len(groups)} groups"
        parameters, cut = _parameters(optimizer), {tuple(each) for each in part["cut"]}
        for at, values in part["state"]["state"].items():
            if not (isinstance(at, int) and isinstance(values, dict)):
                continue
            is_cut = hasattr(parameters[at], "to_local")
            for name in values:
                if ((at, name) in cut) and not is_cut:
                    return "its copy is of a model that is cut over processes"
                local = parameters[at].to_local() if is_cut else parameters[at]
                if (at, name) in cut and values[name].shape != local.shape:
                    return f"its copy is of a model that is cut otherwise ({name})"
    return ""


def _unpack_optimizer(
    optimizer: torch.optim.Optimizer, part: dict[str, Any], *, keeps_groups: bool
) -> None:
    parameters = _parameters(optimizer)
    for at, name in part["cut"]:
        from torch.distributed.tensor import DTensor

        like, values = parameters[at], part["state"]["state"][at]
        values[name] = DTensor.from_local(
            values[name].to(like.device),
            like.device_mesh,
            like.placements,
            run_check=False,
            shape=like.shape,
            stride=like.stride(),
        )
    own = [{k: v for k, v in each.items() if k != "params"} for each in optimizer.param_groups]
    optimizer.load_state_dict(part["state"])
    if keeps_groups:
        for group, values in zip(optimizer.param_groups, own, strict=True):
            group.update(values)


def _random_state() -> dict[str, Any]:
    import torch

    kind, keys, at, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (str(kind), torch.from_numpy(np.asarray(keys, np.int64)), at, has_gauss, gauss),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def _set_random_state(state: dict[str, Any]) -> None:
    import torch

    version, messages, gauss = state["python"]
    random.setstate((version, tuple(messages), gauss))
    kind, keys, at, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), at, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
