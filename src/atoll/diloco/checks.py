"""Whether the replicas train right: looked at in the first rounds, and in each one for numbers.

What is found wrong is said by every replica, in its log and in `DiLoCo.warnings`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from atoll.core.errors import ValidationError
from atoll.core.warnings import MAX_WARNINGS
from atoll.diloco import probe
from atoll.diloco.allreduce.keys import parse_upload
from atoll.diloco.allreduce.manifest import HEAVIEST, Manifest
from atoll.diloco.allreduce.team import Team, together
from atoll.diloco.allreduce.work import Values
from atoll.diloco.inner import forget_bad
from atoll.diloco.outer import Floats, Fragment

if TYPE_CHECKING:
    import torch

log = logging.getLogger("atoll.diloco")

_MAX_WARNINGS = 1000
_NO_SUMS = (0, 0)


class _Digest(NamedTuple):
    """What one process of a replica has seen in what it is about to send."""

    bad: int | None
    pseudo_gradient: probe.Sums
    data: probe.Sums
    buffers: probe.Sums
    frozen: probe.Blocks


class Checks:
    """The checks of one process of a replica."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        team: Team,
        *,
        is_group_chosen: bool,
    ) -> None:
        self._model, self._optimizers, self._team = model, optimizers, team
        self._is_group_chosen = is_group_chosen
        self._inputs = probe.InputWatch(model)
        self._probes = probe.ROUNDS
        self._frozen: probe.Blocks | None = None  # summed once: it may be most of the model
        self._kinds: set[str] = set()
        self.warnings: deque[str] = deque(maxlen=_MAX_WARNINGS)
        self._untold: list[str] = []  # what the control plane does not know yet

    def warn(self, messages: str, *, is_in_manifest: bool = False) -> None:
        """Warn the user. The control plane reads by itself what is in the manifest of a round."""
        self.warnings.append(messages)
        if not is_in_manifest:
            self._untold.append(messages)
        log.warning("%s", messages)

    def take_untold(self) -> list[str]:
        """The warnings since the last call, for the report of a round."""
        untold, self._untold = self._untold[:MAX_WARNINGS], []
        return untold

    def close(self) -> None:
        self._inputs.close()

    def before_first_round(self) -> None:
        """Raises ValidationError if torch.distributed has come to span replicas meanwhile."""
        import torch.distributed as dist

        is_up = dist.is_available() and dist.is_initialized()
        if is_up and not self._is_group_chosen and dist.get_world_size() != self._team.processes:
            raise ValidationError(
                "process_group",
                f"of {dist.get_world_size()} processes",
                f"expected the {self._team.processes} of this replica, as when DiLoCo was made: "
                "torch.distributed was initialised later, over replicas. Start them with "
                "--rendezvous none (rendezvous_backend='none'), or initialise it before DiLoCo",
            )

    def examine(self, fragment: Fragment, pseudo_gradient: Floats) -> str:
        """The note to send along with the movement. One that is not finite is set to zeros."""
        is_probed = self._next_probe()

        def check() -> tuple[int | None, probe.Sums]:
            bad = probe.first_bad(fragment, pseudo_gradient)
            return bad, probe.row_sums(
                fragment, pseudo_gradient
            ) if is_probed and bad is None else _NO_SUMS

        note = self._examine(check, is_probed=is_probed)
        if probe.read_bad(note) is not None:
            pseudo_gradient.fill(0)
        return note

    def examine_parts(self, fragment: Fragment, pseudo_gradient: Values) -> str:
        """As `examine`, for a movement that comes part by part; it is the caller's to leave out."""
        is_probed = self._next_probe()
        # Before words are shared: parts may come from other processes, in messages of their own.
        known = probe.check_parts(fragment, pseudo_gradient, is_summed=is_probed)
        return self._examine(lambda: known, is_probed=is_probed)

    def _next_probe(self) -> bool:
        """Whether this is one of the first rounds, in which replicas compare themselves."""
        is_probed = self._probes > 0
        self._probes -= is_probed
        return is_probed

    def _examine(
        self, check: Callable[[], tuple[int | None, probe.Sums]], *, is_probed: bool
    ) -> str:
        def read() -> _Digest:
            bad, sums = check()
            if not is_probed or bad is not None:
                return _Digest(bad, _NO_SUMS, _NO_SUMS, _NO_SUMS, {})
            buffers = _NO_SUMS if self._team.process else probe.buffer_sums(self._model)
            if self._frozen is None:
                self._frozen = probe.frozen_sums(self._model)
            return _Digest(None, sums, self._inputs.sums, buffers, self._frozen)

        messages = together(self._team, read)
        bad = [message.bad for message in messages if message.bad is not None]
        if bad:
            return probe.note_bad(min(bad))
        if not is_probed:
            return ""
        return probe.ReplicaProbe(
            probe.digest([message.pseudo_gradient for message in messages]),
            probe.digest([message.data for message in messages]),
            probe.digest([message.buffers for message in messages]),
            probe.frozen_digest([message.frozen for message in messages]),
        ).note

    def learn(
        self,
        number: int,
        rank: int,
        fragment: Fragment,
        notes: Mapping[int, str],
        manifest: Manifest | None,
    ) -> None:
        """Say what the notes of a round tell, and its manifest."""
        self._weigh(number, manifest)
        for other, slot in left_out(notes).items():
            name = fragment.slots[slot].name if slot < len(fragment.slots) else "a parameter"
            self.warn(
                f"round {number} leaves out rank {other}: its {name} is not finite. It goes on "
                "from the global parameters",
                is_in_manifest=True,
            )
        probes = {
            other: matches for other, note in notes.items() if (matches := probe.read_probe(note))
        }
        names = (probe.buffer_names, probe.frozen_names)
        for kind, messages in probe.compare(
            probes, rank, *(partial(n, self._model) for n in names)
        ):
            if kind not in self._kinds:
                self._kinds.add(kind)
                self.warn(f"round {number}: {messages}")

    def _weigh(self, number: int, manifest: Manifest | None) -> None:
        """Say once of each rank that it counts for less than what it said that it weighs."""
        for member in manifest.members if manifest is not None else ():
            upload, kind = parse_upload(member.upload), f"weight of {member.rank}"
            if upload is not None and upload.weight > member.weight and kind not in self._kinds:
                self._kinds.add(kind)
                self.warn(
                    f"round {number}: rank {member.rank} weighs {upload.weight:g} and counts as "
                    f"{member.weight:g}, {HEAVIEST} times the median. All replicas must count() "
                    "the same thing"
                )

    def heal(self) -> None:
        """The inner optimisers can train finite parameters again."""
        count = forget_bad(self._optimizers)
        if count:
            self.warn(f"the inner optimiser begins again for {count} parameters: not finite")


def left_out(notes: Mapping[int, str]) -> dict[int, int]:
    """The ranks whose movement is not finite, and the index of the parameter."""
    slots = ((rank, probe.read_bad(note)) for rank, note in notes.items())
    return {rank: slot for rank, slot in slots if slot is not None}
