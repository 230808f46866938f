"""Publisher and Follower over a folder: bits, faults between any two requests, refusals."""

from __future__ import annotations

import json
import os
import resource
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from atoll.core.errors import Permanent, StoreDenied, ValidationError
from atoll.weights import Damaged, Follower, Publisher, Superseded, Temporary, Version, api
from atoll.weights.group import Owners
from atoll.weights.records import Claim, VersionRecord, log_key, looks_like_claim, seal
from atoll.weights.state import Tensors, TensorsChange, Threads, load_files
from tests.support.stores import FaultyStore, run_threads


@pytest.fixture(autouse=True)
def faulty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "ObjectStore", FaultyStore)
    monkeypatch.setattr(FaultyStore, "fault", None)


def weights(step: int) -> dict[str, torch.Tensor]:
    """Some tensors that change a little with each step; the step tells their values."""
    rng = np.random.default_rng(7)
    tensors = {
        f"layer.{n}": torch.from_numpy(rng.standard_normal((40, 30)).astype(np.float32))
        for n in range(4)
    }
    tensors["embed"] = torch.arange(500, dtype=torch.int64)
    for name, tensor in tensors.items():
        tensor.view(-1)[step % 7 :: 97] += step + len(name)
    return {
        name: each.bfloat16() if each.is_floating_point() else each
        for name, each in tensors.items()
    }


def assert_is(follower: Follower, step: int) -> None:
    expected, tensors = weights(step), follower.tensors()
    assert expected.keys() == tensors.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensors[name], tensor), name


def test_a_follower_has_the_bits_of_every_version(tmp_path: Path) -> None:
    with Publisher(tmp_path, full_every=4, keep=1) as publisher, Follower(tmp_path) as follower:
        for step in range(12):
            version = publisher.publish(weights(step), step=step)
            assert follower.next() == version == follower.version
            assert_is(follower, step)
            follower.verify()
        assert follower.next() is None
        with Follower(tmp_path) as joiner:
            assert joiner.next() == version
            assert_is(joiner, 11)


def test_a_delta_is_small_and_an_unchanged_version_has_no_bytes(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path)
    full = publisher.publish(weights(0))
    assert publisher.publish(weights(1)).bytes < full.bytes / 5
    assert publisher.publish(weights(1)) == Version(4, None, 0, 0)


def test_what_is_published_has_the_type_asked_for(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    Publisher(tmp_path, dtype=torch.bfloat16).publish(model.named_parameters())
    follower = Follower(tmp_path)
    follower.next()
    assert {each.dtype for each in follower.tensors().values()} == {torch.bfloat16}
    other = torch.nn.Linear(3, 2)
    follower.copy_into(other)
    assert torch.equal(other.weight, model.weight.bfloat16().float())
    arrays = {"floats": np.ones(3, np.float64), "numbers": np.arange(3)}
    Publisher(tmp_path / "numpy", dtype=torch.bfloat16).publish(arrays)
    with Follower(tmp_path / "numpy") as reader:
        reader.next()
        types = {name: each.dtype for name, each in reader.tensors().items()}
    assert types == {"floats": torch.bfloat16, "numbers": torch.int64}


def test_tensors_come_go_and_change_type_and_shape(tmp_path: Path) -> None:
    publisher, follower = Publisher(tmp_path), Follower(tmp_path)
    versions = [
        {"a": torch.ones(3), "b": torch.zeros(2, 2)},
        {"a": torch.ones(3).bfloat16(), "c": torch.tensor(5)},
        {"a": torch.ones(4).bfloat16(), "b": torch.tensor([True]), "c": torch.empty(0)},
        {"z": torch.full((2,), float("nan"))},
    ]
    for tensors in versions:
        publisher.publish(tensors)
        follower.next()
        found = follower.tensors()
        assert found.keys() == tensors.keys()
        for name, each in tensors.items():
            assert (found[name].dtype, found[name].shape) == (each.dtype, each.shape)
            assert torch.equal(found[name].nan_to_num(), each.nan_to_num())


def test_an_optimizer_that_steps_meanwhile_makes_a_version_that_followers_take(
    tmp_path: Path,
) -> None:
    publisher, follower = Publisher(tmp_path), Follower(tmp_path)
    publisher.publish(weights(0))
    follower.next()
    tensors = weights(1)

    def stepping() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors.items():
            yield name, tensor
            for each in tensors.values():
                each += 1

    version = publisher.publish(stepping())
    assert follower.next() == version
    assert publisher.publish(weights(2))
    assert follower.next()
    assert_is(follower, 2)


def test_each_tensor_of_an_iterator_may_lie_in_the_same_memory(tmp_path: Path) -> None:
    publisher, follower = Publisher(tmp_path), Follower(tmp_path)
    memory = torch.empty(40, 30)

    def staged(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors.items():
            yield name, memory.copy_(tensor)

    for step in range(3):  # a full copy, then deltas
        tensors = {str(n): torch.full((40, 30), float(n + step)) for n in range(4)}
        publisher.publish(staged(tensors))
        assert follower.next()
        found = follower.tensors()
        assert all(torch.equal(found[name], each) for name, each in tensors.items())


def test_publishes_of_several_threads_come_one_after_the_other(tmp_path: Path) -> None:
    publisher, versions = Publisher(tmp_path, full_every=5), list[Version]()
    both = threading.Barrier(2, timeout=30)

    def publish(first: int) -> None:
        for step in range(first, first + 10):
            both.wait()
            versions.append(publisher.publish(weights(step), step=step))

    run_threads(lambda: publish(0), lambda: publish(10))
    assert sorted(each.number for each in versions) == [*range(2, 22)]
    follower = Follower(tmp_path)
    for version in sorted(versions, key=lambda each: each.number):
        if follower.next(number=version.number):
            assert version.step is not None
            assert_is(follower, version.step)
    assert follower.version
    assert follower.version.number == 21


def test_the_newer_trainer_wins_and_goes_on_with_a_delta(tmp_path: Path) -> None:
    old, follower = Publisher(tmp_path), Follower(tmp_path)
    old.publish(weights(0), step=0)
    follower.next()
    new = Publisher(tmp_path)
    with pytest.raises(Superseded, match="another publisher"):
        old.publish(weights(1))
    version = new.publish(weights(2), step=2)
    assert version.bytes < 1000
    with pytest.raises(Superseded):
        old.publish(weights(3))
    old.close()
    assert follower.next() == version
    assert_is(follower, 2)


class Killed(BaseException):
    """The process ends here."""


def count_requests(fail_at: int, how: Callable[[], BaseException], is_after: bool) -> list[int]:
    """Fail request `fail_at`, before or after it happens; returns a list that grows with each."""
    made: list[int] = []

    def fault(what: str, key: str, is_done: bool) -> None:
        if not is_done:
            made.append(1)
        if len(made) == fail_at and is_done == is_after:
            raise how()

    FaultyStore.fault = staticmethod(fault)  # type: ignore[assignment]
    return made


@pytest.mark.parametrize("is_after", [False, True])
def test_a_trainer_may_be_killed_between_any_two_requests(tmp_path: Path, is_after: bool) -> None:
    at = 0
    while True:
        at += 1
        folder = tmp_path / str(at)
        made = count_requests(at, Killed, is_after)
        is_killed = False
        committed = -1
        try:
            publisher = Publisher(folder, full_every=2, keep=0)
            for step in range(4):
                publisher.publish(weights(step), step=step)
                committed = step
        except Killed:
            is_killed = True
        FaultyStore.fault = None
        with Follower(folder) as follower:
            version = follower.next()
            if version is not None:
                assert version.step is not None
                assert committed <= version.step <= committed + 1
                assert_is(follower, version.step)
            else:
                assert committed == -1
            resumed = Publisher(folder, full_every=2, keep=0)
            newest = resumed.publish(weights(9), step=9)
            assert follower.next() == newest
            assert_is(follower, 9)
        if not is_killed:
            assert len(made) > 30
            return


@pytest.mark.parametrize("is_after", [False, True])
def test_a_publish_without_an_answer_is_neither_lost_nor_made_twice(
    tmp_path: Path, is_after: bool
) -> None:
    publisher, follower = Publisher(tmp_path, full_every=3, keep=0), Follower(tmp_path)
    made = count_requests(-1, Killed, is_after)
    for step in range(4):
        publisher.publish(weights(step), step=step)
    for at in range(1, len(made) // 2):
        step = 10 * at
        count_requests(at, lambda: Temporary("no answer"), is_after)
        try:
            publisher.publish(weights(step), step=step)
        except Temporary:
            pass
        FaultyStore.fault = None
        before = follower.version
        version = publisher.publish(weights(step + 1), step=step + 1)
        assert follower.next() == version
        assert before is None or version.number > before.number
        assert_is(follower, step + 1)


def test_close_settles_a_publish_without_an_answer(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path)
    publisher.publish(weights(0), step=0)

    def fault(what: str, key: str, is_done: bool) -> None:
        if what == "create" and not is_done:
            raise Temporary("no answer")

    FaultyStore.fault = staticmethod(fault)  # type: ignore[assignment]
    with pytest.raises(Temporary):
        publisher.publish(weights(1), step=1)
    FaultyStore.fault = None
    publisher.close()
    follower = Follower(tmp_path)
    version = follower.next()
    assert version is not None
    assert (version.number, version.step) == (3, 1)
    assert_is(follower, 1)


def test_publish_reads_its_iterator_to_the_end_whatever_happens(tmp_path: Path) -> None:
    old = Publisher(tmp_path)
    Publisher(tmp_path)
    taken = []

    def tensors(bad: object = None) -> Iterator[tuple[str, object]]:
        for number in range(5):
            taken.append(number)
            yield f"t{number}", torch.full((2,), number) if number != 2 else bad

    with pytest.raises(Superseded):
        old.publish(tensors(torch.zeros(1)))
    assert taken == [0, 1, 2, 3, 4]
    taken.clear()
    new = Publisher(tmp_path)
    with pytest.raises(ValidationError, match="t2"):
        new.publish(tensors(torch.zeros(2, dtype=torch.complex64)))
    assert taken == [0, 1, 2, 3, 4]
    taken.clear()
    with pytest.raises(ValidationError, match="step"):
        new.publish(tensors(torch.zeros(2)), step="last")  # type: ignore[arg-type]
    assert taken == [0, 1, 2, 3, 4]
    taken.clear()
    with pytest.raises(ValidationError, match="not empty"):
        new.publish((name if name != "t2" else "", each) for name, each in tensors(torch.zeros(2)))
    assert taken == [0, 1, 2, 3, 4]
    assert new.publish(tensors(torch.zeros(2))).number


def test_a_follower_that_may_only_read_follows_without_a_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fault(what: str, key: str, is_done: bool) -> None:
        if what not in ("get", "list"):
            raise StoreDenied("the store refused access")

    publisher = Publisher(tmp_path, full_every=3, keep=0)
    publisher.publish(weights(0), step=0)
    with Follower(tmp_path) as follower:
        for step in range(1, 8):
            monkeypatch.setattr(FaultyStore, "fault", None)
            publisher.publish(weights(step), step=step)
            monkeypatch.setattr(FaultyStore, "fault", staticmethod(fault))
            assert follower.next()
            assert_is(follower, step)
        assert not (tmp_path / "lease").exists()
    assert [each.getMessage() for each in caplog.records if "lease" in each.getMessage()] == [
        "following without a lease, so versions may be skipped: the store refused access"
    ]


def test_a_number_is_reached_exactly_or_not_at_all(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path, full_every=2)
    numbers = [publisher.publish(weights(step), step=step).number for step in range(6)]
    follower = Follower(tmp_path)
    assert follower.next(number=numbers[3]).step == 3  # type: ignore[union-attr]
    assert_is(follower, 3)
    assert follower.next(number=numbers[3]).step == 3  # type: ignore[union-attr]
    assert follower.next(number=numbers[-1] + 1) is None
    with pytest.raises(ValidationError, match="number"):
        follower.next(number=numbers[2])
    # On the way to a number that does not come it went to the newest, which nobody has got yet.
    assert follower.next().step == 5  # type: ignore[union-attr]
    assert follower.next() is None


def test_values_are_those_of_the_array_in_any_order_of_bytes_or_dimensions(tmp_path: Path) -> None:
    values = np.arange(12.0).reshape(3, 4)
    arrays = {
        "big": values.astype(">f4"),
        "transposed": values.T,
        "backwards": values[::-1],
        "one": np.float64(3),
    }
    Publisher(tmp_path).publish(arrays)
    follower = Follower(tmp_path)
    follower.next()
    for name, tensor in follower.tensors().items():
        assert np.array_equal(tensor.numpy(), arrays[name]), name


def test_every_type_of_tensor_comes_back_bit_for_bit_and_in_the_folder(tmp_path: Path) -> None:
    publisher, follower = Publisher(tmp_path / "a"), Follower(tmp_path / "a")
    rng, out = np.random.default_rng(3), tmp_path / "out"
    for step in range(3):
        tensors = {}
        for name in api.DTYPES:
            values = torch.from_numpy(
                rng.integers(0, 2 if name == "bool" else 256, 24 * 8, np.uint8)
            )
            tensors[name] = values.view(getattr(torch, name)).reshape(2, -1).T
        publisher.publish(tensors, step=step)
        assert follower.next()
        follower.verify()
        for found in (follower.tensors(), load_file(f"{follower.write(out)}/model.safetensors")):
            for name, each in tensors.items():
                assert (found[name].dtype, found[name].shape) == (each.dtype, each.shape)
                bits = (each.contiguous().view(torch.uint8), found[name].view(torch.uint8))
                assert torch.equal(*bits), name


def test_a_folder_that_others_read_is_never_written(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").write_text("old weights")
    publisher = Publisher(tmp_path / "channel", files=tmp_path / "model")
    follower, out = Follower(tmp_path / "channel"), tmp_path / "out"
    for step in range(3):
        publisher.publish(weights(step), step=step)
        follower.next()
        path = follower.write(out)
        assert path == follower.write(out)
        assert os.path.realpath(out / "current") == path
        found = load_file(f"{path}/model.safetensors")
        assert all(torch.equal(found[name], each) for name, each in weights(step).items())
        assert (Path(path) / "config.json").read_text() == "{}"
    names = [".atoll-weights", "current", "v3", "v4"]
    assert sorted(each.name for each in out.iterdir()) == names


def test_the_path_of_a_version_is_good_in_every_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Publisher(tmp_path / "a").publish(weights(1))
    follower = Follower(tmp_path / "a")
    follower.next()
    monkeypatch.chdir(tmp_path)
    assert follower.write("out") == f"{tmp_path}/out/v2"


def test_a_folder_that_had_versions_of_another_channel_has_those_of_the_new_one(
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    for channel, steps in (("long", range(6)), ("short", range(10, 13)), ("short2", [20])):
        publisher, follower = Publisher(tmp_path / channel), Follower(tmp_path / channel)
        for step in steps:
            publisher.publish(weights(step), step=step)
            follower.next()
            path = follower.write(out)
            assert os.path.realpath(out / "current") == path
            found = load_file(f"{path}/model.safetensors")
            assert all(torch.equal(found[name], each) for name, each in weights(step).items())
            assert len(list(out.glob("v*"))) <= 2


def test_a_folder_that_does_not_fit_on_the_disk_leaves_nothing_there(tmp_path: Path) -> None:
    publisher, follower, out = Publisher(tmp_path / "a"), Follower(tmp_path / "a"), tmp_path / "out"
    publisher.publish(weights(1), step=1)
    follower.next()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            follower.write(out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [each.name for each in out.iterdir()] == [".atoll-weights"]
    assert load_file(f"{follower.write(out)}/model.safetensors").keys() == weights(1).keys()


@pytest.mark.parametrize("name", ["../config.json", "/etc/passwd", ".atoll-state"])
def test_a_file_of_a_full_copy_stays_in_the_folder_that_is_written(name: str) -> None:
    with pytest.raises(Damaged, match="plain names"):
        load_files({name: b"{}"}, Threads(1).run)


def test_a_folder_of_before_a_loss_of_power_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher, follower, out = Publisher(tmp_path / "a"), Follower(tmp_path / "a"), tmp_path / "out"
    publisher.publish(weights(1), step=1)
    follower.next()
    path = Path(follower.write(out))
    (path / "model.safetensors").write_bytes(b"")
    (tmp_path / "boot").write_text("another\n")
    monkeypatch.setattr(api, "BOOT_ID", tmp_path / "boot")
    assert follower.write(out) == str(path)
    assert load_file(path / "model.safetensors").keys() == weights(1).keys()


def test_a_folder_with_an_own_current_is_refused(tmp_path: Path) -> None:
    publisher, follower, out = Publisher(tmp_path / "a"), Follower(tmp_path / "a"), tmp_path / "out"
    publisher.publish(weights(1), step=1)
    follower.next()
    out.mkdir()
    (out / ".atoll-weights").touch()
    (out / "current").mkdir()
    with pytest.raises(ValidationError, match="'current'"):
        follower.write(out)
    assert sorted(each.name for each in out.iterdir()) == [".atoll-weights", "current"]


def test_a_folder_has_two_versions_at_the_most_also_while_one_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher, follower, out = Publisher(tmp_path / "a"), Follower(tmp_path / "a"), tmp_path / "out"
    before = list[list[str]]()
    write = api._write_version

    def write_version(copy: Tensors, target: Path) -> None:
        before.append(sorted(each.name for each in out.glob("v*")))
        write(copy, target)

    monkeypatch.setattr(api, "_write_version", write_version)
    for step in range(4):
        publisher.publish(weights(step), step=step)
        follower.next()
        follower.write(out)
    assert before == [[], ["v2"], ["v3"], ["v4"]]
    assert sorted(each.name for each in out.glob("v*")) == ["v4", "v5"]


@pytest.mark.parametrize("is_changed", [0, 1, 2])
def test_an_interrupt_while_the_base_changes_makes_no_wrong_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_changed: int
) -> None:
    """Ctrl-C in a notebook: the same publisher goes on. The base has changed not yet, half, or
    all of it."""
    publisher, follower = Publisher(tmp_path, full_every=3), Follower(tmp_path)
    publisher.publish(weights(0), step=0)
    assert follower.next()
    apply = Tensors.apply

    def interrupted(self: Tensors, change: TensorsChange) -> None:
        monkeypatch.setattr(Tensors, "apply", apply)
        if is_changed == 1:
            for row in change.rows:
                row.indices, row.values = row.indices[::2], row.values[::2]
        if is_changed:
            digests, state = self.digests, self.state
            apply(self, change)
            if is_changed == 1:
                self.digests, self.state = digests, state
        raise KeyboardInterrupt

    monkeypatch.setattr(Tensors, "apply", interrupted)
    with pytest.raises(KeyboardInterrupt):
        publisher.publish(weights(1), step=1)
    for step in range(2, 9):
        publisher.publish(weights(step), step=step)
        assert follower.next()
        assert_is(follower, step)
        with Follower(tmp_path) as joiner:
            assert joiner.next()
            assert_is(joiner, step)


def test_large_models_have_several_files_and_an_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.weights.state.FILE_BYTES", 5000)
    monkeypatch.setattr("atoll.weights.state.PART_BYTES", 3000)
    monkeypatch.setattr("atoll.weights.state.ROW_VALUES", 1000)
    publisher, follower = Publisher(tmp_path / "a", full_every=3), Follower(tmp_path / "a")
    for step in range(5):
        publisher.publish(weights(step), step=step)
        follower.next()
        assert_is(follower, step)
    path = Path(follower.write(tmp_path / "out"))
    index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) == 3
    for name, file in index.items():
        assert torch.equal(load_file(path / file)[name], weights(4)[name])


def test_a_new_trainer_with_other_files_brings_them_to_those_who_follow(tmp_path: Path) -> None:
    config, follower = tmp_path / "config.json", Follower(tmp_path / "a")
    for step in range(3):
        config.write_text(f'{{"step": {step // 2}}}')
        version = Publisher(tmp_path / "a", files=[config]).publish(weights(step), step=step)
        assert (version.bytes > 5000) == (step != 1)  # where the files are the same, a delta
        assert follower.next() == version
        assert_is(follower, step)
        path = Path(follower.write(tmp_path / "out"))
        assert (path / "config.json").read_text() == config.read_text()


def test_what_is_no_tensor_is_refused_with_its_name_in_a_group_too() -> None:
    assert [*Owners(0, 1).select([("x", None), ("y", "text")])] == [("x", None), ("y", "text")]


def test_an_adapter_is_a_small_set_of_tensors(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    Publisher(tmp_path / "a", files=[tmp_path / "adapter_config.json"]).publish(weights(0))
    follower = Follower(tmp_path / "a")
    follower.next()
    names = os.listdir(follower.write(tmp_path / "out"))
    assert sorted(names) == [".atoll-state", "adapter_config.json", "adapter_model.safetensors"]


def test_a_module_that_does_not_fit_is_left_as_it_is(tmp_path: Path) -> None:
    Publisher(tmp_path).publish(torch.nn.Linear(3, 2).named_parameters())
    follower = Follower(tmp_path)
    with pytest.raises(Damaged, match="next"):
        follower.tensors()
    follower.next()
    larger = torch.nn.Linear(3, 2)
    larger.register_parameter("more", torch.nn.Parameter(torch.zeros(1)))
    smaller = torch.nn.Linear(3, 2, bias=False)
    for module in (torch.nn.Linear(2, 2), smaller, torch.nn.Identity(), larger):
        before = [each.clone() for each in module.parameters()]
        with pytest.raises(ValidationError, match="module"):
            follower.copy_into(module)
        assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    with pytest.raises(ValidationError, match="memory"):
        follower.copy_into(torch.nn.Linear(3, 2, device="meta"))


def test_verify_sees_memory_that_has_changed(tmp_path: Path) -> None:
    publisher, follower = Publisher(tmp_path), Follower(tmp_path)
    for step in range(3):
        version = publisher.publish(weights(step))
        follower.next()
    follower.tensors()["embed"][3] = 9
    with pytest.raises(Damaged, match="embed"):
        follower.verify()
    with pytest.raises(Damaged, match="next"):
        follower.tensors()
    assert follower.next() == version
    assert_is(follower, 2)
    follower.verify()
    assert follower.next() is None


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        ({"full_every": 0}, "full_every"),
        ({"full_every": True}, "full_every"),
        ({"keep": -1}, "keep"),
        ({"keep": 1.5}, "keep"),
        ({"files": 5}, "files"),
        ({"files": "/nowhere"}, "files"),
        ({"files": ["/etc/passwd.bin"]}, "files"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"dtype": torch.complex64}, "dtype"),
        ({"dtype": torch.int8}, "dtype"),
    ],
)
def test_bad_input_is_refused_before_anything_happens(
    tmp_path: Path, bad: dict[str, object], field: str
) -> None:
    with pytest.raises(ValidationError, match=field):
        Publisher(tmp_path / "a", **bad)  # type: ignore[arg-type]
    assert not (tmp_path / "a").exists()
    for name in ("a/b", "", 5):
        with pytest.raises(ValidationError, match="name"):
            Follower(tmp_path / "a", name=name)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "bad",
    [{"number": True}, {"number": 0}, {"number": 2.0}, {"number": 10**10},
     {"timeout": -1}, {"timeout": None}, {"timeout": float("nan")}, {"timeout": "5"}],
)  # fmt: skip
def test_a_follower_refuses_numbers_and_times_that_are_none(
    tmp_path: Path, bad: dict[str, Any]
) -> None:
    publisher, follower = Publisher(tmp_path), Follower(tmp_path)
    publisher.publish(weights(1), step=1)
    with pytest.raises(ValidationError, match=next(iter(bad))):
        follower.next(**bad)
    assert follower.next()
    assert_is(follower, 1)


@pytest.mark.parametrize(
    "bad",
    [{}, iter(()), {"__metadata__": torch.ones(1)}, {"": torch.ones(1)}, [(None, torch.ones(1))],
     {"\ud800": torch.ones(1)}, {"x": "text"}, {"x": None}, torch.nn.Linear(2, 2),
     torch.nn.Linear(2, 2).parameters(), [("x",)], {"x": torch.ones(1, dtype=torch.complex64)},
     {"x": torch.ones(1, device="meta")}, {"x": torch.eye(2).to_sparse()}],
)  # fmt: skip
def test_what_followers_could_not_take_is_not_published(tmp_path: Path, bad: Any) -> None:
    publisher, follower = Publisher(tmp_path), Follower(tmp_path)
    for step in (1, 2):  # a full copy, then a delta
        with pytest.raises(ValidationError, match="named_tensors"):
            publisher.publish(bad)
        with pytest.raises(ValidationError, match="step"):
            publisher.publish(weights(step), step=True)
        publisher.publish(weights(step), step=step)
        assert follower.next()
        assert_is(follower, step)


def test_a_publisher_opens_after_thousands_of_claims_with_a_bounded_number_of_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Publisher(tmp_path, full_every=2) as publisher:
        publisher.publish(weights(1), step=1)
    for number in range(3, 2003):
        claim = Claim(number=number, publisher=f"{number:016x}")
        (tmp_path / log_key(number)).write_bytes(seal(claim))
    asked = Counter[str]()
    monkeypatch.setattr(FaultyStore, "fault", staticmethod(lambda what, *_: asked.update([what])))
    with Publisher(tmp_path, full_every=2, keep=0) as publisher, Follower(tmp_path) as follower:
        assert asked["get"] < 40  # each request is counted before and after
        for step in range(2, 8):
            version = publisher.publish(weights(step), step=step)
        assert follower.next() == version
        assert_is(follower, 7)
    assert asked["get"] < 100
    assert asked["list"] < 100
    assert len(list((tmp_path / "log").iterdir())) < 2010


def test_the_size_of_a_record_tells_a_claim_from_a_version() -> None:
    claim = Claim(number=9_999_999_999, publisher="f" * 16)
    version = VersionRecord(number=1, publisher="f", state="0" * 64)
    assert looks_like_claim(len(seal(claim)))
    assert not looks_like_claim(len(seal(version)))


def test_one_that_is_closed_says_so(tmp_path: Path) -> None:
    with Publisher(tmp_path) as publisher, Follower(tmp_path) as follower:
        publisher.publish(weights(0))
    with pytest.raises(Permanent, match="it is closed: make another Publisher or Follower"):
        publisher.publish(weights(1))
    with pytest.raises(Permanent, match="it is closed: make another Publisher or Follower"):
        follower.next(timeout=60.0)
    assert not any(each.is_file() for each in (tmp_path / "lease").rglob("*"))
    with Publisher(tmp_path), Follower(tmp_path) as follower:
        follower.next()
    with pytest.raises(Permanent, match="it is closed"):
        follower.next()  # there is no newer version
    with Follower(tmp_path) as other:
        other.next(timeout=60.0)
        assert_is(other, 0)
