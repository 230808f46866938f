"""Where a gang's control group would be, and whose processes are in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.backends.local.processes import CGROUP_FILE, cgroup_for, cgroup_members, remove_cgroup

MOUNT = "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw"


def machine(root: Path, *, mount: str = MOUNT, group: str = "0::/user/me") -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/mountinfo").write_text(f"1 1 0:1 / / rw - ext4 /dev/vda rw\n{mount}\n")
    (root / "proc/self/cgroup").write_text(f"8:pids:/\n{group}\n")
    (root / "sys/fs/cgroup/unified/user/me").mkdir(parents=True)
    return root


def test_group_is_below_the_own_one(tmp_path: Path) -> None:
    expected = tmp_path / "sys/fs/cgroup/unified/user/me/atoll-abc.7.8."
    assert cgroup_for(Path("/state/ranks/abc"), "7.8.", machine(tmp_path)) == str(expected)


@pytest.mark.parametrize(
    "odd", [{"mount": ""}, {"group": ""}, {"group": "0::/../other"}, {"group": "0::/gone"}]
)
def test_there_is_none_where_none_may_be_made(tmp_path: Path, odd: dict[str, str]) -> None:
    assert cgroup_for(Path("/state/ranks/abc"), "7.8.", machine(tmp_path, **odd)) == ""


def test_only_a_group_of_that_very_gang_is_believed(tmp_path: Path) -> None:
    gang, other = tmp_path / "abc", tmp_path / "atoll-other"
    gang.mkdir()
    other.mkdir()
    (other / "cgroup.procs").write_text("1\n2\n")
    assert cgroup_members(gang) == set()
    (gang / CGROUP_FILE).write_text(str(other))
    assert cgroup_members(gang) == set()
    own = other.rename(tmp_path / "atoll-abc")
    (gang / CGROUP_FILE).write_text(str(own))
    assert cgroup_members(gang) == {1, 2}
    remove_cgroup(gang)  # a group with processes stays
    assert own.exists()


@pytest.mark.parametrize("damage", [b"/sys/fs/\xff\xfe", b"/sys/\0fs", b""])
def test_a_gang_whose_file_is_damaged_has_no_group_and_can_be_removed(
    tmp_path: Path, damage: bytes
) -> None:
    gang = tmp_path / "abc"
    gang.mkdir()
    (gang / CGROUP_FILE).write_bytes(damage)
    remove_cgroup(gang)
    assert cgroup_members(gang) == set()


def test_only_a_group_of_that_very_gang_is_removed(tmp_path: Path) -> None:
    gang, other, own = (tmp_path / name for name in ("abc", "empty", "atoll-abc.7"))
    for folder in (gang, other, own):
        folder.mkdir()
    (gang / CGROUP_FILE).write_text(str(other))
    remove_cgroup(gang)
    assert other.exists()
    (gang / CGROUP_FILE).write_text(str(own))
    remove_cgroup(gang)
    assert not own.exists()
