"""Whether the replicas train right: looked at in the first rounds, and in each one for numbers.

What is found wrong is said by every replica, in its log and in `DiLoCo.warnings`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from atoll.core.errors import ValidationError
from atoll.core.ranks import MAX_WARNINGS
from atoll.diloco import probe
from atoll.diloco.group import Processes, gather
from atoll.diloco.inner import few, forget_bad
from atoll.diloco.model import ModelFragment
from atoll.diloco.probe import buffer_names, frozen_names
from atoll.diloco.reports import read_bad
from atoll.diloco.round.decide import HEAVIEST
from atoll.diloco.round.objects import Manifest

if TYPE_CHECKING:
    import torch

log = logging.getLogger("atoll.diloco")

_MAX_WARNINGS = 1000
_NO_SUMS = (0, 0)


class _Digest(NamedTuple):
    """What one process of a replica has seen in what it is about to upload."""

    bad: int | None
    moved: probe.Sums
    batches: probe.Sums
    buffers: probe.Sums
    frozen: probe.Blocks


class Checks:
    """The checks of one process of a replica."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        group: Processes,
        *,
        is_group_chosen: bool,
    ) -> None:
        self._model, self._optimizers, self._group = model, optimizers, group
        self._is_group_chosen = is_group_chosen
        self._inputs = probe.InputWatch(model)
        self._probes = probe.ROUNDS
        self._is_probed = False
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
        if is_up and not self._is_group_chosen and dist.get_world_size() != self._group.processes:
            raise ValidationError(
                "process_group",
                f"of {dist.get_world_size()} processes",
                f"expected the {self._group.processes} of this replica, as when DiLoCo was made: "
                "torch.distributed was initialised later, over replicas. Start them with "
                "--rendezvous none (rendezvous_backend='none'), or initialise it before DiLoCo",
            )

    def begin(self, fragment: ModelFragment) -> probe.RowProbe:
        """Looks at the pseudo-gradient of a round as it is taken."""
        self._is_probed = self._probes > 0
        self._probes -= self._is_probed
        return probe.RowProbe(fragment, is_summed=self._is_probed)

    def describe(self, row: probe.RowProbe, weight: float) -> dict[str, str]:
        """What to tell of the pseudo-gradient; all processes of the replica call it."""
        is_shared = self._is_probed and row.bad is None

        def read() -> _Digest:
            if not is_shared:
                return _Digest(row.bad, _NO_SUMS, _NO_SUMS, _NO_SUMS, {})
            buffers = _NO_SUMS if self._group.process else probe.buffer_sums(self._model)
            if self._frozen is None:
                self._frozen = probe.frozen_sums(self._model)
            return _Digest(None, row.sums, self._inputs.sums, buffers, self._frozen)

        digests = gather(self._group, read)
        bad = [each.bad for each in digests if each.bad is not None]
        if bad:
            return {"bad": str(min(bad))}
        if not self._is_probed:
            return {}
        return {
            "moved": probe.digest([each.moved for each in digests]),
            "batches": probe.digest([each.batches for each in digests]),
            "buffers": probe.digest([each.buffers for each in digests]),
            "frozen": probe.frozen_digest([each.frozen for each in digests]),
            "weight": repr(weight),
        }

    def learn(self, rank: int, fragment: ModelFragment, manifest: Manifest) -> None:
        """Warn of what a manifest tells."""
        number = manifest.round
        for member in manifest.members:
            self._weigh(number, member.rank, member.weight, member.sums.get("weight", ""))
            index = read_bad(member.sums)
            if index is not None:
                spans = fragment.spans
                name = spans[index].name if index < len(spans) else "a parameter"
                self.warn(
                    f"round {number} leaves out rank {member.rank}: its {name} is not finite. It "
                    "continues from the global parameters",
                    is_in_manifest=True,
                )
        probed = {member.rank: member.sums for member in manifest.members if "moved" in member.sums}
        for kind, message in self._compare(rank, probed):
            if kind not in self._kinds:
                self._kinds.add(kind)
                self.warn(f"round {number}: {message}")

    def _compare(
        self, rank: int, probed: Mapping[int, Mapping[str, str]]
    ) -> Iterator[tuple[str, str]]:
        """What is wrong in a world with these digests, as kind and sentence."""
        own = "Give each replica data of its own (diloco.data(...), or by diloco.config.rank)"
        # One step of Adam is as long whatever the gradient: other batches can lead to the same.
        moved = [
            ranks
            for ranks in _alike(probed, "moved")
            if not _is_unlike({each: probed[each] for each in ranks}, "batches")
        ]
        for ranks in moved:
            yield (
                "identical pseudo-gradients",
                f"ranks {_and(ranks)} have identical pseudo-gradients: they train on the same data "
                f"with the same random numbers, so that together they learn what one would. {own}",
            )
        for ranks in _alike(probed, "batches"):
            if not any(set(ranks) <= set(each) for each in moved):
                yield "identical data", f"ranks {_and(ranks)} were given the same batches. {own}"
        if rank not in probed:
            return
        if _is_unlike(probed, "buffers"):
            yield (
                "buffers differ",
                f"buffers of the model differ between replicas ({few(buffer_names(self._model))}): "
                "they are not synchronised, each replica keeps its own",
            )
        if _is_unlike(probed, "frozen"):
            yield (
                "frozen parameters differ",
                "parameters that are not trained differ between replicas "
                f"({few(frozen_names(self._model))}): they are not synchronised, so that each "
                "replica trains another model. Begin with the same ones: one seed, or one "
                "checkpoint",
            )

    def _weigh(self, number: int, rank: int, weight: float, claimed: str) -> None:
        """Say once of each rank that it counts for less than what it said that it weighs."""
        kind = f"weight of {rank}"
        if claimed and kind not in self._kinds and float(claimed) > weight > 0:
            self._kinds.add(kind)
            self.warn(
                f"round {number}: rank {rank} weighs {float(claimed):g} and counts as {weight:g}, "
                f"{HEAVIEST} times the median. All replicas must count() the same thing"
            )

    def heal(self) -> None:
        """The inner optimisers can train finite parameters again."""
        count = forget_bad(self._optimizers)
        if count:
            self.warn(f"the inner optimiser starts over for {count} parameters: not finite")


def _alike(probed: Mapping[int, Mapping[str, str]], name: str) -> list[list[int]]:
    """The ranks that have the same digest, where there are several of them."""
    by_digest: dict[str, list[int]] = {}
    for rank, sums in sorted(probed.items()):
        by_digest.setdefault(sums.get(name, probe.NOTHING), []).append(rank)
    by_digest.pop(probe.NOTHING, None)
    return [ranks for ranks in by_digest.values() if len(ranks) > 1]


def _is_unlike(probed: Mapping[int, Mapping[str, str]], name: str) -> bool:
    return len({sums.get(name, probe.NOTHING) for sums in probed.values()} - {probe.NOTHING}) > 1


def _and(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:-1])) + f" and {ranks[-1]}"
