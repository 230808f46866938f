"""The queue of a machine: the oldest first, and what it wants is kept for it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from atoll.backends.local.capacity import (
    Capacity,
    Devices,
    DeviceShare,
    StartQueue,
    Waiting,
    describe_lack,
    describe_use,
    requested,
)
from atoll.core.spec import Resources

NO_DEVICES = Devices().free
ONE_SLOT = {"slots": 1}


def queue(*waiting: Waiting) -> StartQueue:
    made = StartQueue()
    for each in waiting:
        made.put(each)
    return made


def entry(
    uid: str,
    wanted: int,
    needed: int | None = None,
    share: DeviceShare | None = None,
    each: dict[str, int] | None = None,
) -> Waiting:
    """Trainings are created in the order of their names."""
    least = wanted if needed is None else needed
    return Waiting(float(ord(uid[0])), uid, ("n", uid), wanted, least, each or ONE_SLOT, share)


def turns(made: StartQueue, slots: int | None, devices: Devices | None = None) -> dict[str, int]:
    amounts = {} if slots is None else {"slots": slots}
    free = Capacity(amounts, NO_DEVICES if devices is None else devices.free)
    return {turn.waiting.uid: turn.ranks for turn in made.turns(free)}


def test_free_slots_go_to_the_oldest_and_what_is_left_to_the_next() -> None:
    made = queue(entry("c", 1), entry("a", 1), entry("b", 2))
    assert turns(made, 1) == {"a": 1}
    assert turns(made, 3) == {"a": 1, "b": 2}
    assert turns(made, 4) == {"a": 1, "b": 2, "c": 1}
    assert made.ranks_for("c", Capacity({"slots": 3}, NO_DEVICES)) == 0


def test_nobody_passes_a_gang_that_is_first_and_waits_for_more() -> None:
    made = queue(entry("a", 4), *(entry(uid, 1) for uid in "bcdef"))
    assert turns(made, 0) == {}
    for slots in (1, 2, 3):
        assert turns(made, slots) == {"a": slots}
    made.remove("a")
    assert turns(made, 2) == {"b": 1, "c": 1}


def test_who_is_not_first_keeps_nothing_that_it_cannot_use() -> None:
    made = queue(entry("a", 1), entry("b", 4), entry("c", 1))
    assert turns(made, 2) == {"a": 1, "b": 1, "c": 1}, "b cannot start with one, c can"
    made.remove("a")
    assert turns(made, 2) == {"b": 2}, "now it is b's turn to be waited for"


def test_one_that_runs_takes_whatever_there_is() -> None:
    made = queue(entry("a", 2), entry("b", 3, needed=1), entry("c", 1))
    assert turns(made, 4) == {"a": 2, "b": 2}


def test_a_rest_of_slots_is_no_ones_concern_who_waits_for_devices() -> None:
    devices = Devices(["0", "1"])
    share = DeviceShare(1, devices.ids)
    devices.assign("z", 2, share)
    made = queue(entry("a", 2, share=share), entry("b", 1, share=share), entry("c", 1))
    assert turns(made, 4, devices) == {"c": 1}
    devices.keep("z", 1)
    assert turns(made, None, devices) == {"a": 1, "c": 1}, "b would take what a waits for"
    other = DeviceShare(1, ["7"])
    made.put(entry("d", 1, share=other))
    assert turns(made, None, devices) == {"a": 1, "c": 1, "d": 1}


def test_a_training_keeps_its_place_and_says_when_it_wants_less() -> None:
    made = queue(entry("a", 4), entry("b", 1))
    assert not made.put(entry("a", 4))
    assert not made.put(entry("a", 5))
    assert made.put(entry("a", 1))
    assert made.is_first("a")
    assert made.remove("a")
    assert not made.remove("a")
    assert "a" not in made
    assert made.is_first("b")


sizes = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), max_size=12)


@given(sizes, st.integers(0, 8))
def test_no_more_is_handed_out_than_is_free_and_the_first_is_never_delayed(
    wanted: list[tuple[int, int]], slots: int
) -> None:
    gangs = [
        entry(chr(ord("a") + number), ranks, min(least, ranks))
        for number, (ranks, least) in enumerate(wanted)
    ]
    given_out = turns(queue(*reversed(gangs)), slots)
    started = {each.uid: given_out[each.uid] for each in gangs if each.uid in given_out}
    taken = sum(started[each.uid] for each in gangs if started.get(each.uid, 0) >= each.needed)
    assert taken <= slots
    if gangs:
        first, *rest = gangs
        assert started.get(first.uid, 0) == min(first.wanted, slots)
        passing = sum(started.get(e.uid, 0) for e in rest if started.get(e.uid, 0) >= e.needed)
        assert passing <= max(slots - first.wanted, 0)


def test_what_is_asked_of_a_long_queue_ends_where_nothing_is_left() -> None:
    asked: list[str] = []

    def devices(share: DeviceShare) -> list[str]:
        asked.append(share.of[0])
        return []

    share = DeviceShare(1, ["0"])
    made = queue(*(entry("a" + str(n), 1, share=share) for n in range(500)))
    assert list(made.turns(Capacity({"slots": 1}, devices))) == []
    assert len(asked) == 1


def test_cpus_and_memory_are_counted_beside_slots() -> None:
    large = {"slots": 1, "cpu": 1500, "memory": 4}
    small = {"slots": 1, "cpu": 500}
    made = queue(entry("a", 2, each=large), entry("b", 1, each=small), entry("c", 1))

    def ranks(**amounts: int) -> dict[str, int]:
        return {turn.waiting.uid: turn.ranks for turn in made.turns(Capacity(amounts, NO_DEVICES))}

    assert ranks(cpu=2000, memory=8) == {"a": 1, "c": 1}, "what a lacks is kept for it"
    assert ranks(cpu=3500, memory=8) == {"a": 2, "b": 1, "c": 1}
    assert ranks(cpu=9000, memory=7) == {"a": 1, "b": 1, "c": 1}
    assert ranks(cpu=9000, memory=8, slots=2) == {"a": 2}
    assert ranks(cpu=-500, memory=8) == {"c": 1}, "a limit was lowered below what is in use"


def test_what_a_rank_asks_for_is_counted_in_thousandths_and_bytes() -> None:
    assert requested(Resources(cpu="500m", memory="2Gi")) == {
        "slots": 1,
        "cpu": 500,
        "memory": 2 * 2**30,
    }
    assert requested(Resources()) == {"slots": 1}


def test_the_reason_for_waiting_names_what_is_short() -> None:
    assert describe_use("slots", 2, 2, 1, "h", 2) == "2 of 2 slots of h are in use"
    cpu = describe_use("cpu", 1500, 2000, 1000, "h", 2)
    assert cpu == "1.5 of 2 CPUs of h are in use, and each rank takes 1"
    memory = describe_use("memory", 0, 2**31, 2**30, "h", 2)
    assert memory == "0 B of 2 GiB of memory of h are in use, and each rank takes 1 GiB"
    assert (
        describe_lack("cpu", 2000, 1500, "h") == "h has too little left of 2 CPUs: a rank takes 1.5"
    )
    assert describe_lack("memory", 2**31, 2**30, "h").endswith(
        "2 GiB of memory: a rank takes 1 GiB"
    )
    never = describe_use("slots", 0, 2, 1, "h", 4)
    assert never.startswith(
        "0 of 2 slots of h are in use: 4 ranks need 4 slots, and 'atoll limits'"
    )
