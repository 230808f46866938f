"""Which processes are the replica, and what is said when they are not."""

from __future__ import annotations

import pytest

from atoll.core.errors import ValidationError
from atoll.diloco.group import SingleProcess, find_group


def test_a_process_without_torch_distributed_is_a_replica_of_its_own() -> None:
    assert isinstance(find_group(None, None, 1.0), SingleProcess)


def test_torchrun_inside_a_rank_without_a_group_is_told_to_make_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2", "ATOLL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValidationError, match=r"process_group: None .*init_process_group"):
        find_group(None, None, 1.0)
    assert isinstance(find_group(None, None, 1.0, rank=1), SingleProcess)


def test_a_group_or_mesh_needs_torch_distributed() -> None:
    for name in ("process_group", "device_mesh"):
        given = {"process_group": None, "device_mesh": None, name: object()}
        with pytest.raises(ValidationError, match=f"{name}: .* initialised"):
            find_group(**given, timeout=1.0)
    with pytest.raises(ValidationError, match="device_mesh: .* one of the two"):
        find_group(object(), object(), 1.0)
