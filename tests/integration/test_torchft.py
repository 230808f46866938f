"""torchft's own algorithms, unmodified, over the object store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import uuid
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.core.errors import ValidationError
from atoll.diloco import ObjectStoreManager
from atoll.integrations.torchft import check_handed
from atoll.objectstore import ObjectStore

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchft.local_sgd import DiLoCo, LocalSGD

NIGHTLY = "torchft-nightly==2026.10.26"
SCRIPT = Path(__file__).with_name("torchft_replicas.py")
torch.set_num_threads(1)


def install_nightly() -> Path:
    """Into a folder of its own: it has the same import name as the release."""
    where = Path(tempfile.gettempdir()) / f"atoll-tests-{os.getuid()}" / NIGHTLY
    if not (where / "torchft").is_dir():
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", where]
        done = subprocess.run([*command, NIGHTLY], capture_output=True, text=True, check=False)
        if done.returncode:
            reason = f"{NIGHTLY} cannot be installed: {done.stderr.strip()[-300:]}"
            if os.environ.get("CI"):
                pytest.fail(reason)
            pytest.skip(reason)
    return where


@pytest.mark.parametrize("version", ["release", "nightly"])
def test_parameters_after_20_rounds_are_those_of_torchft_in_process(version: str) -> None:
    path = [str(install_nightly())] if version == "nightly" else []
    path += filter(None, [os.environ.get("PYTHONPATH")])
    done = subprocess.run(
        [sys.executable, SCRIPT],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    differences = json.loads(done.stdout)
    assert len(differences) == 6
    assert {name: d for name, d in differences.items() if d > 1e-6} == {}


def side_by_side(*work: Callable[[], None]) -> list[BaseException]:
    errors: list[BaseException] = []

    def run(each: Callable[[], None]) -> None:
        try:
            each()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(each,)) for each in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


class Heap(torch.nn.Module):
    """Parameters of any shapes; `move` is what training would do to them."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.all = torch.nn.ParameterList(torch.zeros(shape) for shape in shapes)

    def move(self, rank: int) -> None:
        for at, value in enumerate(self.all):
            count = torch.arange(value.numel(), dtype=torch.float32).reshape(value.shape)
            value.grad = -(count + 1) * (rank + 1) * (at + 1)


SHAPES = st.lists(
    st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple), min_size=1, max_size=6
)


@settings(max_examples=8, deadline=None)
@given(shapes=SHAPES, bucket_bytes=st.sampled_from([None, 32, 200, 1 << 20]))
def test_every_element_of_every_tensor_is_reduced_or_the_round_is_refused(
    shapes: list[tuple[int, ...]], bucket_bytes: int | None
) -> None:
    uri = f"memory:///{uuid.uuid4()}"
    heaps = [Heap(shapes), Heap(shapes)]

    def replica(rank: int) -> None:
        heap = heaps[rank]
        manager = ObjectStoreManager(uri=uri, rank=rank, world_size=2, min_replicas=2)
        inner = torch.optim.SGD(heap.parameters(), lr=1.0)
        outer = torch.optim.SGD(heap.parameters(), lr=1.0)
        bucket = bucket_bytes and bucket_bytes / 2**20
        more = {"use_bucketization": bucket is not None, "bucket_cap_mb": bucket}
        with DiLoCo(manager, [heap], inner, outer, sync_every=1, **more):
            heap.move(rank)
            inner.step()
        manager.shutdown()

    errors = side_by_side(lambda: replica(0), lambda: replica(1))
    if errors:
        assert bucket_bytes is not None
        assert all(isinstance(e, ValidationError) for e in errors), errors
        assert all("use_bucketization" in str(e) for e in errors)
        return
    for at, (first, second) in enumerate(zip(heaps[0].all, heaps[1].all, strict=True)):
        count = torch.arange(first.numel(), dtype=torch.float32).reshape(first.shape)
        assert torch.equal(first, (count + 1) * 1.5 * (at + 1))
        assert torch.equal(second, first)


class Negate:
    """Shows which elements torchft hands over: those that come back with the other sign."""

    _use_async_quorum = False

    def __init__(self) -> None:
        self.handed: list[int] = []

    def register_state_dict_fn(self, *_: object) -> None: ...

    def allreduce(self, tensor: torch.Tensor, should_quantize: bool = False) -> Any:
        self.handed.append(tensor.numel())
        tensor.neg_()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result([tensor])
        return type("Done", (), {"get_future": lambda self: future})()


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=8), bucket=st.integers(1, 60))
def test_buckets_are_refused_exactly_where_torchft_would_leave_elements_out(
    sizes: list[int], bucket: int
) -> None:
    heap, manager = Heap([(size,) for size in sizes]), Negate()
    inner = torch.optim.SGD(heap.parameters(), lr=1.0)
    loop = DiLoCo(
        manager,
        [heap],
        inner,
        inner,
        sync_every=1,
        use_bucketization=True,
        bucket_cap_mb=bucket * 4 / 2**20,
    )
    fragment = loop._fragments[0]
    fragment._grads = {str(at): torch.ones(size) for at, size in enumerate(sizes)}
    fragment._allreduce_bucketized()
    is_lost = any((grad > 0).any() for grad in fragment._grads.values())
    if is_lost:
        with pytest.raises(ValidationError, match="use_bucketization"):
            check_handed(sizes, manager.handed)
    else:
        for count in range(len(manager.handed) + 1):
            check_handed(sizes, manager.handed[:count])


@pytest.mark.parametrize("is_overtaken", [False, True])
def test_a_replica_that_comes_later_has_the_same_bits_after_every_step(is_overtaken: bool) -> None:
    """`is_overtaken`: a round is committed between the loading of the state and its first round."""
    uri = f"memory:///{uuid.uuid4()}"
    store, has_loaded = ObjectStore.open(uri), threading.Event()
    after: dict[str, dict[int, list[torch.Tensor]]] = {"stays": {}, "leaves": {}, "comes": {}}

    class Manager(ObjectStoreManager):
        def start_quorum(self, *args: Any, **more: Any) -> None:
            super().start_quorum(*args, **more)
            if is_overtaken and self.current_step() == 4 and self.participating_rank() == 1:
                has_loaded.set()
                wait_until(lambda: is_stored("manifest/", "00000004"))

    def is_stored(folder: str, key: str) -> bool:
        return any(key in info.key for info in store.list(f"run.torchft-0/{folder}"))

    def has_checkpoint(step: int) -> bool:
        return any(info.key.endswith(f"/{step:010d}") for info in store.list("run.torchft"))

    def wait_until(is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not is_so():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def replica(name: str, rank: int, rounds: int, at_step: Callable[[int], None]) -> None:
        net = torch.nn.Linear(7, 3)  # every replica begins with other values
        inner = torch.optim.AdamW(net.parameters(), lr=1e-2)
        manager = Manager(
            state_dict=net.state_dict,
            load_state_dict=net.load_state_dict,
            uri=uri,
            rank=rank,
            world_size=2,
            min_replicas=1,
            grace_s=4.0,
            checkpoint_every=2,
        )
        outer = torch.optim.SGD(net.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        with DiLoCo(manager, [net], inner, outer, sync_every=2):
            while (step := manager.current_step()) < rounds:
                net(torch.randn(4, 7)).square().mean().backward()
                inner.step()
                inner.zero_grad()
                if manager.current_step() != step:
                    values = [p.detach().clone() for p in net.parameters()]
                    after[name][manager.current_step()] = values
                at_step(manager.current_step())
        manager.shutdown()

    def wait_for_the_other(step: int) -> None:
        if is_overtaken and step == 4 and has_checkpoint(4):
            wait_until(has_loaded.is_set)
        if (is_overtaken and step == 5) or (step == 6 and has_checkpoint(6)):
            wait_until(lambda: is_stored("upload/", f"/{step:08d}/00001."))

    def comes_later() -> None:
        replica("leaves", 1, 3, lambda step: None)
        wait_until(lambda: is_overtaken or has_checkpoint(6))
        replica("comes", 1, 10, lambda step: None)

    errors = side_by_side(lambda: replica("stays", 0, 10, wait_for_the_other), comes_later)
    assert errors == []
    assert sorted(after["leaves"]) == [1, 2, 3]
    assert {7, 8, 9, 10} <= set(after["comes"])
    for name in ("leaves", "comes"):
        for step, values in after[name].items():
            assert all(map(torch.equal, values, after["stays"][step])), (name, step)


def test_local_sgd_averages_the_parameters() -> None:
    uri, nets = f"memory:///{uuid.uuid4()}", [torch.nn.Linear(3, 2) for _ in range(2)]
    expected = [(a + b) / 2 for a, b in zip(*(net.parameters() for net in nets), strict=True)]

    def replica(rank: int) -> None:
        manager = ObjectStoreManager(uri=uri, rank=rank, world_size=2, min_replicas=2)
        inner = torch.optim.SGD(nets[rank].parameters(), lr=0.0)
        with LocalSGD(manager, nets[rank], inner, sync_every=1):
            nets[rank](torch.ones(1, 3)).sum().backward()
            inner.step()
        manager.shutdown()

    assert side_by_side(lambda: replica(0), lambda: replica(1)) == []
    for net in nets:
        assert all(map(torch.allclose, net.parameters(), expected))


def test_alone_it_needs_no_store() -> None:
    net = torch.nn.Linear(3, 2)
    manager = ObjectStoreManager(rank=0, world_size=1)
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    outer = torch.optim.SGD(net.parameters(), lr=1.0)
    before = net.weight.detach().clone()
    with DiLoCo(manager, [net], inner, outer, sync_every=2):
        for _ in range(4):
            net(torch.ones(1, 3)).sum().backward()
            inner.step()
            inner.zero_grad()
    assert manager.current_step() == 2
    assert torch.allclose(net.weight, before - 0.4)
