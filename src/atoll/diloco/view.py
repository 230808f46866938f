"""What a script sees of its replica: what was found wrong, what rounds cost, the word to go."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from atoll.core.errors import ValidationError
from atoll.diloco import export
from atoll.diloco.allreduce.team import Solo
from atoll.diloco.checks import Checks
from atoll.diloco.data.report import DataReport
from atoll.diloco.group import ProcessTeam
from atoll.diloco.leave import Departure
from atoll.diloco.model import ReplicaModel
from atoll.diloco.outer import Fragment
from atoll.diloco.own_state import Extras, OwnState
from atoll.diloco.replica_config import ReplicaConfig, RunHome
from atoll.diloco.reports import RoundReport, RoundReports
from atoll.diloco.run import RunFace

if TYPE_CHECKING:
    import torch

log = logging.getLogger("atoll.diloco")


class ReplicaFace(RunFace):
    """The part of `DiLoCo` that is about this replica and that its steps do not need."""

    _checks: Checks
    _rounds: RoundReports
    _departure: Departure
    _has_left: bool
    _model: ReplicaModel
    _team: Solo | ProcessTeam
    _own: OwnState | None
    _home: RunHome | None
    fragments: list[Fragment]
    config: ReplicaConfig

    @property
    def warnings(self) -> list[str]:
        """What was found wrong with this training, in sentences; they are in the log as well."""
        return list(self._checks.warnings)

    @property
    def reports(self) -> deque[RoundReport]:
        """What the last rounds cost, one entry each."""
        return self._rounds.last

    def metrics(self) -> dict[str, float]:
        """Totals since the start: rounds, bytes up and down, seconds hidden and blocked."""
        return dict(self._rounds.totals)

    def data_report(self) -> DataReport:
        """What of the data was used, in which round and by whom, as the store has it."""
        with self._departure.busy():
            return super().data_report()

    @property
    def leaving(self) -> bool:
        """Whether this replica was told to go, or has left.

        Its program may end now, or be ended by one of its next two steps, with exit code 143.
        """
        return self._departure.is_requested or self._has_left

    def leave(self) -> None:
        """Hand in what was trained since the last round, and leave the others to go on.

        SIGTERM does the same. A replica of several processes leaves after its next round.
        """
        self._departure.go()

    def checkpoint(
        self, *, inner: bool = False, extras: Extras | Callable[[], Extras] | None = None
    ) -> None:
        """The run can go on from here: its global parameters are in the store as of the last round.

        With `inner`, also what is this replica's own: the state of its inner optimisers, the random
        numbers of Python, numpy and torch, and `extras` of the script, by name. They are kept
        now, after each round with a checkpoint (`checkpoint_every`) and at the end; the newest two
        copies of each rank stay. A DiLoCo with the same rank restores them when it is made, and its
        script finds its extras in `extras`. A function gives extras as they are each time.

        All processes of a replica call it together. Without a store nothing is kept, and said so.
        """
        own = self._own
        if extras is not None and not inner:
            raise ValidationError("extras", "given", "expected inner=True with them")
        if own is None:
            messages = (
                "checkpoint() keeps nothing: there is no store; pass uri=, or save state_dict()"
            )
            if messages not in self._checks.warnings:
                self._checks.warn(messages)
            return
        with self._departure.busy():
            self._receive()
            if inner:
                own.keep(extras)
                own.save(self.round, self.step)
            for fragment, stream in zip(self.fragments, self._streams, strict=True):
                if fragment.rounds:
                    fragment.ledger = self._data.journal.packed()
                    stream.checkpoint(fragment)

    @property
    def extras(self) -> Mapping[str, Any] | None:
        """What `checkpoint(inner=True, extras=…)` of this rank kept; None if there is nothing."""
        return None if self._own is None else self._own.extras

    @property
    def restored_step(self) -> int | None:
        """The run's step of which the inner optimisers are, if they were restored."""
        copy = None if self._own is None else self._own.restored
        return None if copy is None else copy.step

    def global_state_dict(self) -> dict[str, torch.Tensor]:
        """The model with the parameters all agree on, by plain names, whole, in host memory.

        `model.load_state_dict` takes it. Buffers and frozen parameters are this replica's. All
        processes of a replica call it together, and each has all of it: `save` needs less memory.
        """
        with self._departure.busy():
            self._receive()
            complete = self._complete()
            return {entry.name: complete.tensor(entry) for entry in complete.entries}

    def save(
        self, target: str | os.PathLike[str], *, file_bytes: int = export.FILE_BYTES
    ) -> list[str]:
        """The model as in `global_state_dict`, as safetensors at `target`; the names of the files.

        `target`: a path or a URI of file:// s3:// gs:// az://. One that ends with `.safetensors` is
        one file; any other is a folder, with files of about `file_bytes` and an index of them. One
        replica saves, and all of its processes call it together: they bring parameter after
        parameter to process 0, which holds one file at a time.
        """
        with self._departure.busy():
            self._receive()
            messages = {"atoll.round": str(self.round), "atoll.step": str(self.step)}
            if self._home is not None:
                messages["atoll.main"] = self._home.name
            is_writer = not self._team.process
            return export.save(self._complete(), target, file_bytes, messages, is_writer=is_writer)

    def _complete(self) -> export.FullModel:
        model = self._model
        return export.FullModel(model.module, model.parameters, self.fragments, self._team)

    def _keep(self) -> None:
        """What is this replica's own is kept once more, if it is to be."""
        if self._own is not None:
            self._own.save_if_retained(self.round, self.step)

    def _restore(self, *, keeps_groups: bool) -> None:
        own = self._own
        if own is None or not self.round:
            return
        reason = own.restore(keeps_groups=keeps_groups)
        rank = self.config.rank
        if own.restored is not None:
            copy = own.restored
            messages = "inner optimiser and random numbers of rank %d as of round %d, step %d"
            log.info(messages + "; the run is at round %d", rank, copy.round, copy.step, self.round)
        elif reason is not None:
            self._checks.warn(
                f"the inner optimiser of rank {rank} begins again in round {self.round}: {reason}"
            )
        else:
            messages = "the inner optimiser of rank %d begins again in round %d: no copy was kept"
            log.info(messages, rank, self.round)
