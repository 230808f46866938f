"""Each rank has GPUs of its own; too few are waited for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.backends.local.capacity import Devices, DeviceShare, ids_of, parse_ids, present
from atoll.core.errors import ValidationError


def test_no_two_ranks_share_a_device() -> None:
    devices = Devices(["0", "1", "2", "3"])
    share = devices.share(1, {})
    assert share is not None
    assert devices.assign("a", 3, share) == {0: ["0"], 1: ["1"], 2: ["2"]}
    assert devices.free(share) == ["3"]
    assert devices.assign("b", 2, share) is None
    assert devices.assign("b", 1, share) == {0: ["3"]}
    assert devices.keep("a", 1)
    assert devices.assign("b", 3, share) == {0: ["3"], 1: ["1"], 2: ["2"]}


def test_a_rank_keeps_its_devices_for_life() -> None:
    devices = Devices(["0", "1", "2", "3"])
    share = DeviceShare(1, devices.ids)
    devices.assign("a", 1, share)
    devices.assign("b", 1, share)
    devices.keep("a", 0)
    assert devices.assign("b", 3, share) == {0: ["1"], 1: ["0"], 2: ["2"]}


def test_a_training_chooses_from_its_own_variable() -> None:
    devices = Devices(["0", "1", "2", "3"])
    assert devices.share(2, {"CUDA_VISIBLE_DEVICES": "3,2,9"}) == DeviceShare(2, ["2", "3"])
    assert devices.share(2, {"CUDA_VISIBLE_DEVICES": ""}) == DeviceShare(2, [])
    assert devices.share(0, {}) is None
    assert Devices().share(1, {}) is None
    assert Devices().share(1, {"CUDA_VISIBLE_DEVICES": "4"}) == DeviceShare(1, ["4"])


def test_a_device_that_is_listed_twice_is_shared() -> None:
    devices = Devices(["0", "0"])
    assert devices.assign("a", 2, DeviceShare(1, devices.ids)) == {0: ["0"], 1: ["0"]}


def test_why_ranks_wait_is_told() -> None:
    devices = Devices(["0", "1"])
    share = DeviceShare(1, devices.ids)
    devices.assign("a", 1, share)
    words = "1 of 2 GPUs of here are in use, and each rank takes 1"
    assert devices.describe(share, "here", 2) == words
    assert devices.describe(share, "here", 8) == f"{words}: 8 ranks need 8"


def test_what_an_earlier_control_plane_gave_stays() -> None:
    devices = Devices(["0", "1"])
    devices.take_over("a", {"0": ["1"]})
    assert devices.assign("b", 1, DeviceShare(1, devices.ids)) == {0: ["0"]}
    assert devices.assign("b", 2, DeviceShare(1, devices.ids)) is None


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5), st.integers(1, 3)), max_size=30)
)
def test_whatever_is_asked_no_device_has_two_owners(steps: list[tuple[str, int, int]]) -> None:
    devices = Devices([str(number) for number in range(6)])
    each: dict[str, int] = {}
    owned: dict[str, Any] = {}
    for uid, size, count in steps:
        share = DeviceShare(each.setdefault(uid, count), devices.ids)
        own = len(owned.get(uid, {}))
        fits = size <= own + len(devices.free(share)) // share.each
        held = devices.assign(uid, size, share)
        assert fits == (held is not None)
        if held is not None:
            devices.keep(uid, size)
            owned[uid] = {rank: ids for rank, ids in held.items() if rank < size}
        everything = [d for ranks in owned.values() for ids in ranks.values() for d in ids]
        assert len(everything) == len(set(everything))


@pytest.mark.parametrize(
    ("value", "ids"),
    [(2, ["0", "1"]), (0, []), ([3, "GPU-8a", "MIG-GPU-1/2/0"], ["3", "GPU-8a", "MIG-GPU-1/2/0"])],
)
def test_devices_are_a_number_or_a_list(value: object, ids: list[str]) -> None:
    assert ids_of("gpus", value) == ids


@pytest.mark.parametrize("value", [-1, True, "0,1", [1.5], ["a b"], [""], 2000])
def test_other_devices_are_refused(value: object) -> None:
    with pytest.raises(ValidationError, match=r"expected a number of GPUs, or a list such as"):
        ids_of("gpus", value)


def test_the_variable_is_read_as_cuda_reads_it() -> None:
    assert parse_ids("0, 2,-1,3") == ["0", "2"]
    assert parse_ids("") == []


def test_devices_of_the_machine_are_found(tmp_path: Path) -> None:
    assert present({}, tmp_path) == []
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    assert present({}, tmp_path) == ["0", "1"]
    assert present({"CUDA_VISIBLE_DEVICES": "5"}, tmp_path) == ["5"]
