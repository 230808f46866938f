"""Stacks of ranks as they are shown: as they were taken, and equal ones folded into one line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from atoll.agent.stack_text import frame_text, main_frames, process_location
from atoll.core.model import convert
from atoll.core.rank_access import FoldedStack, StackList
from atoll.core.text import spans

Json = Mapping[str, Any]


def stack_list(stacks: Sequence[Json]) -> StackList:
    return convert({"items": stacks, "folded": fold(stacks)}, StackList)


def fold(ranks: Iterable[Json]) -> list[FoldedStack]:
    """Equal stacks in one line: those of ranks, then those of the processes they started."""
    groups: dict[tuple[bool, str, tuple[str, ...]], list[int]] = {}
    for one in ranks:
        if not one.get("processes"):
            why = one.get("reason") or "it has no process"
            groups.setdefault((False, why, ()), []).append(one["rank"])
        for number, process in enumerate(one.get("processes", ())):
            stack = tuple(map(frame_text, main_frames(process)))
            key = (number > 0, process_location(process), stack)
            groups.setdefault(key, []).append(one["rank"])
    folded = [
        FoldedStack(
            ranks=(numbers := spans(sorted(set(members)))),
            count=len(members),
            is_child=is_child,
            where=where,
            stack=list(stack),
            message=_describe(numbers, len(members), is_child, where, bool(stack)),
        )
        for (is_child, where, stack), members in groups.items()
    ]
    return sorted(folded, key=lambda group: (group.is_child, -group.count, group.ranks))


def _describe(ranks: str, count: int, is_child: bool, where: str, has_stack: bool) -> str:
    """`5 ranks (0-2, 4, 5) in …`, `rank 3 in …`, `a child of rank 3 in …`."""
    is_one = "," not in ranks and "-" not in ranks
    if is_child:
        owner = f"rank {ranks}" if is_one else f"ranks {ranks}"
        who = f"{'a child' if count == 1 else f'{count} children'} of {owner}"
    else:
        who = f"rank {ranks}" if is_one else f"{count} ranks ({ranks})"
    return f"{who} in {where}" if has_stack else f"{who}: {where}"
