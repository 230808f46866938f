"""What rounds show: who joined and left, what a round cost, and how far a run is in words."""

from __future__ import annotations

from msgspec.structs import replace

from atoll.core.rounds import (
    OpenRound,
    ReportedRound,
    RoundCost,
    RoundFacts,
    StoredRound,
    items_of,
    states,
    summary_of,
    with_observed,
    with_report,
)


def facts(number: int, members: list[int], **more: object) -> RoundFacts:
    return RoundFacts(
        run="run",
        round=number,
        members=members,
        weights=[1.0] * len(members),
        **more,  # type: ignore[arg-type]
    )


def test_the_processes_of_a_replica_add_up() -> None:
    kept = StoredRound()
    for cost in (
        RoundCost(0, 100, 300, 7, 1.5, 0.5, 0),
        RoundCost(0, 100, 300, 7, 1.0, 2.5, 1),
        RoundCost(1, 200, 600, 9, 0.0, 0.0, 0),
        RoundCost(0, 100, 300, 7, 1.0, 2.5, 1),  # one that arrives twice counts once
    ):
        kept = with_report(kept, ReportedRound("run", 0, 4, cost, facts(4, [0, 1], parameters=100)))
    (item,) = items_of([kept], has_costs=True)
    assert (item.bytes_up, item.bytes_down, item.requests) == (400, 1200, 23)
    assert (item.hidden_s, item.blocked_s) == (1.5, 2.5)
    assert item.bits_up == 8 * 200 / 100
    assert item.bits_per_parameter == 8 * 800 / 100
    assert [cost.rank for cost in item.costs or ()] == [0, 1]


def test_joined_left_late_and_missing_each_have_a_letter() -> None:
    rounds = [
        facts(0, [0, 1, 2, 3]),
        facts(1, [0, 1, 2], missing=[3]),
        facts(2, [0, 1], leaving=[1], late=[2], missing=[2]),
        facts(3, [0, 2, 5], bad=[2]),
    ]
    items = items_of(StoredRound(observed=each) for each in rounds)
    assert [item.joined for item in items] == [[], [], [], [5]]
    assert [item.left for item in items] == [[], [], [], [1]]
    letters = [states(item) for item in items]
    assert letters[0] == dict.fromkeys(range(4), "i")
    assert letters[1] == {0: "i", 1: "i", 2: "i", 3: "m"}
    assert letters[2] == {0: "i", 1: "i", 2: "l"}
    assert letters[3] == {0: "i", 1: "-", 2: "n", 5: "j"}


def test_a_void_round_is_no_reason_to_have_joined() -> None:
    rounds = [facts(0, [0, 1]), facts(1, [], error="the tensors differ"), facts(2, [0, 1])]
    items = items_of(StoredRound(observed=each) for each in rounds)
    assert [(item.joined, item.left) for item in items] == [([], [])] * 3


def test_the_store_wins_over_what_replicas_tell_and_what_it_cost_is_added() -> None:
    cost = RoundCost(1, 100, 300, 7, 1.5, 0.5)
    told = facts(4, [0, 1], parameters=100)
    kept = with_report(StoredRound(), ReportedRound("run", 0, 4, cost, told))
    (item,) = items_of([kept])
    assert (item.source, item.members) == ("reports", [0, 1])
    kept = with_report(kept, ReportedRound("run", 0, 4, RoundCost(0, 200, 200, 5, 0.0, 2.0)))
    kept = with_observed(kept, facts(4, [0, 1, 2], sizes=[10, 20, 30]))
    (item,) = items_of([kept], has_costs=True)
    assert (item.source, item.members) == ("store", [0, 1, 2])
    assert (item.bytes_up, item.bytes_down, item.hidden_s, item.blocked_s) == (60, 500, 1.5, 2.0)
    assert item.bits_per_parameter == 8 * 800 / 2 / 100
    assert item.bits_up == 8 * 20 / 100
    assert [each.rank for each in item.costs or ()] == [0, 1]


def test_what_nobody_told_is_unknown_not_zero() -> None:
    (item,) = items_of([StoredRound(observed=facts(0, [0]))])
    assert (item.bytes_up, item.bytes_down, item.hidden_s, item.bits_per_parameter) == (None,) * 4


def test_what_was_seen_before_it_was_swept_stays() -> None:
    first = with_observed(StoredRound(), facts(0, [0], missing=[1], late=[1], sizes=[9], at=5.0))
    again = with_observed(first, facts(0, [0], missing=[1]))
    assert again.observed == first.observed
    later = with_observed(first, replace(facts(0, [0, 1]), attempt=1))
    assert later.observed is not None
    assert later.observed.late == []


def test_the_summary_tells_who_is_behind_and_who_is_waited_for() -> None:
    newest = StoredRound(observed=facts(43, [0, 1, 2], missing=[3], late=[4], at=7.0, leaving=[2]))
    open_round = OpenRound(fragment=0, round=44, uploaded=[0])
    summary = summary_of("run", [newest], 100.0, 8.0, [open_round])
    assert summary is not None
    assert (summary.round, summary.rounds, summary.behind) == (43, 44, [3, 4])
    assert summary.waited_for == [1, 4]
    assert (summary.tokens, summary.moved_at, summary.source) == (100.0, 7.0, "store")
    assert summary.message == (
        "44 rounds committed, the last with 3 of 5 (ranks 3-4 behind); "
        "round 44 waits for ranks 1, 4"
    )
    assert summary_of("run", [], 0.0, None) is None


def test_a_run_is_as_far_as_all_its_fragments() -> None:
    kept = [
        StoredRound(observed=facts(n, [0], fragment=f, fragments=2)) for f, n in ((0, 5), (1, 4))
    ]
    summary = summary_of("run", kept, 0.0, None)
    assert summary is not None
    assert (summary.round, summary.rounds, summary.fragments) == (5, 5, 2)
