"""What thousands of ranks say is bounded; those that failed first keep their words."""

from __future__ import annotations

import msgspec

from atoll.core.model import encode
from atoll.core.ranks import (
    MAX_TEXT_BYTES,
    OMITTED,
    with_bounded_ends,
    with_bounded_messages,
    with_texts_of,
)
from atoll.core.status import Exit, Observation, ObservedRank, RankStatus

replace = msgspec.structs.replace


def ended(rank: int, at: float, *, words: str = "", tail: list[str] | None = None) -> RankStatus:
    exit = Exit(code=1, at=at, reason="Error", message=words, log_tail=tail or [])
    return RankStatus(rank=rank, phase="Failed", attempt=0, exit=exit)


def texts(ranks: dict[int, RankStatus]) -> int:
    return sum(
        len(r.exit.message) + len("".join(r.exit.log_tail)) for r in ranks.values() if r.exit
    )


def test_few_ranks_keep_all_their_texts() -> None:
    ranks = {n: ended(n, 1.0, words=f"w{n}", tail=[f"line {n}"] * 20) for n in range(100)}
    assert with_bounded_ends(ranks.values()) == ranks


def test_a_text_that_all_share_is_kept_by_all() -> None:
    ranks = {n: ended(n, 1.0, tail=["x" * 1000]) for n in range(10_000)}
    assert with_bounded_ends(ranks.values()) == ranks


def test_of_many_different_texts_those_of_the_first_failures_stay() -> None:
    count = 2_000
    ranks = [ended(n, float(count - n), tail=[f"{n}:" + "x" * 500]) for n in range(count)]
    bounded = with_bounded_ends(ranks)
    assert texts(bounded) <= MAX_TEXT_BYTES
    keeps = [n for n, r in bounded.items() if r.exit and r.exit.log_tail]
    assert keeps == list(range(count - len(keeps), count))
    assert len(keeps) > 100


def test_a_second_look_changes_nothing() -> None:
    """Otherwise every pass would write."""
    sizes = [700, 30_000, 200, 50_000, 5]
    ranks = [ended(n, 1.0, tail=[f"{n}:" + "x" * sizes[n % 5]]) for n in range(500)]
    once = with_bounded_ends(ranks)
    assert with_bounded_ends(once.values()) == once


def test_ranks_that_wait_for_different_things_do_not_fill_the_store() -> None:
    waiting = [RankStatus(rank=n, message=f"{n}: " + "no room " * 30) for n in range(10_000)]
    bounded = with_bounded_messages(waiting)
    assert bounded[0].message == waiting[0].message
    assert bounded[-1].message == OMITTED
    assert len(encode([r.message for r in bounded[:300]])) < 2 * MAX_TEXT_BYTES


def test_the_root_cause_gets_its_texts_back_from_the_executor() -> None:
    bare = ended(3, 1.0)
    exit = Exit(code=1, at=1.0, reason="Error", message="m", log_tail=["loss is nan"])
    observed_rank = ObservedRank(rank=3, state="exited", attempt=0, exit=exit)
    assert with_texts_of(bare, Observation(ranks=[observed_rank])).exit == exit
    later = replace(observed_rank, attempt=1)
    assert with_texts_of(bare, Observation(ranks=[later])) == bare
