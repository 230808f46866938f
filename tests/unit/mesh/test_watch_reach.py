"""Reports in, verdict out."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.core.mesh import MeshState
from atoll.mesh.watch import MAX_NAMED, MAX_PAIRS, Fabric, Membership, ReachReport


def membership(n: int, version: int = 1) -> Membership:
    return Membership(
        version=version, addresses={f"h{at}": ("10.0.0.1", 1000 + at) for at in range(n)}
    )


def report(host: int, n: int, missing: list[int], version: int = 1) -> ReachReport:
    names = sorted(f"h{peer}" for peer in missing)
    return ReachReport(
        host=f"h{host}",
        membership=version,
        reached=n - 1 - len(names),
        unreached=len(names),
        named=names[:MAX_NAMED],
    )


def judged(fabric: Fabric, *, is_overdue: bool = False) -> tuple[MeshState, str]:
    return fabric.judge(is_overdue=is_overdue)


@settings(deadline=None)
@given(st.integers(1, 12), st.data())
def test_ready_is_exactly_when_every_newest_report_misses_nobody(
    n: int, data: st.DataObject
) -> None:
    fabric = Fabric(membership(n))
    newest: dict[int, list[int]] = {}
    for host in data.draw(st.lists(st.integers(0, n - 1), max_size=30)):
        others = [peer for peer in range(n) if peer != host]
        missing = data.draw(st.lists(st.sampled_from(others), unique=True)) if others else []
        newest[host] = missing
        fabric.fold(report(host, n, missing))
    is_ready = len(newest) == n and not any(newest.values())
    assert fabric.is_complete == is_ready
    state, message = judged(fabric)
    assert (state is MeshState.READY) == is_ready
    assert bool(message) != is_ready
    assert judged(fabric, is_overdue=True)[0] is (
        MeshState.READY if is_ready else MeshState.DEGRADED
    )


def test_one_host_is_ready_with_its_first_word() -> None:
    fabric = Fabric(membership(1))
    fabric.fold(report(0, 1, []))
    assert judged(fabric) == (MeshState.READY, "")


def test_a_pair_is_named_once_and_one_way_failures_as_such() -> None:
    fabric = Fabric(membership(4))
    fabric.fold(report(0, 4, [1]))
    fabric.fold(report(1, 4, [0, 2]))
    fabric.fold(report(2, 4, []))
    assert judged(fabric)[1] == "cannot talk: h0 <-> h1, h1 -> h2; no report from h3"


def test_reports_on_another_roster_or_from_strangers_do_not_count() -> None:
    fabric = Fabric(membership(2, version=2))
    fabric.fold(report(0, 2, [], version=1))
    fabric.fold(report(7, 2, [], version=2))
    assert judged(fabric)[1] == "no report from h0, h1"


def test_a_newer_roster_starts_anew_and_an_older_one_is_ignored() -> None:
    fabric = Fabric(membership(1))
    fabric.fold(report(0, 1, []))
    fabric.enlist(membership(2, version=2))
    assert judged(fabric)[0] is MeshState.PENDING
    fabric.enlist(membership(1, version=1))
    assert judged(fabric)[1] == "no report from h0, h1"


def test_a_thousand_hosts_in_two_halves_make_a_short_message() -> None:
    n = 1000
    fabric = Fabric(membership(n))
    for host in range(n):
        fabric.fold(report(host, n, [peer for peer in range(n) if (peer < 500) != (host < 500)]))
    message = judged(fabric, is_overdue=True)[1]
    assert len(message) < 400
    assert "more" in message
    assert message.count("->") <= MAX_PAIRS


def test_hosts_that_never_came_are_named() -> None:
    verdict = Fabric().judge(is_overdue=True, missing={"b", "a"})
    assert verdict.message == "not all hosts have come up: no agent on a, b"
