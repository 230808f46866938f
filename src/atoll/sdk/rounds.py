"""The outer rounds of a training, as a table of columns."""

from __future__ import annotations

from atoll.core.rounds import RoundItem, RoundList, RoundSummary
from atoll.sdk.metrics import ColumnTable

COLUMNS = tuple(name for name in RoundItem.__struct_fields__ if name != "costs")


class RoundTable(ColumnTable):
    """Columns of equal length: `table["members"]` is a list of lists. One row for each round of
    each fragment, in order.

    `why` says where the rounds come from, `summary` how far the run is (None before the first),
    and `dropped` how many of the oldest rounds are not kept any more.
    """

    def __init__(self, answer: RoundList, *, has_costs: bool = False) -> None:
        names = (*COLUMNS, "costs") if has_costs else COLUMNS
        super().__init__({name: [getattr(i, name) for i in answer.items] for name in names})
        self.why: str = answer.why
        self.summary: RoundSummary | None = answer.summary
        self.dropped: int = answer.dropped

    def __repr__(self) -> str:
        words = "no round yet" if self.summary is None else self.summary.words
        return f"<RoundTable: {words}>"
