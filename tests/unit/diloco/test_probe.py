"""Digests by which replicas find out that they moved alike: equal for equal movements only."""

from __future__ import annotations

import numpy as np
import pytest

from atoll.diloco import probe
from atoll.diloco.allreduce.layout import Layout
from atoll.diloco.allreduce.share import Share
from atoll.diloco.allreduce.work import Take
from atoll.diloco.outer import Floats, Fragment, split
from atoll.diloco.packing import TensorSpec

SIZE = 1000


def fragment(process: int = 0, processes: int = 1) -> Fragment:
    complete = split([("a", (700,)), ("b", (300,))], 1)[0]
    layout = Layout((TensorSpec("float32", (SIZE,)),), 3, "fp32", "fp32", "", 8)
    complete.carry(Share(layout, process, processes))
    return complete


def digest(values: Floats, processes: int = 1) -> str:
    sums = []
    for process in range(processes):
        part = fragment(process, processes)
        row = np.concatenate([values[start:stop] for start, stop in part.share.intervals])
        sums.append(probe.row_sums(part, row))
    return probe.digest(sums)


def pseudo_gradient(seed: int = 0) -> Floats:
    return np.random.default_rng(seed).normal(size=SIZE).astype(np.float32)


@pytest.mark.parametrize("processes", [2, 3, 8])
def test_a_movement_has_one_digest_however_the_replica_is_cut(processes: int) -> None:
    assert digest(pseudo_gradient(), processes) == digest(pseudo_gradient())
    assert digest(pseudo_gradient(1), processes) != digest(pseudo_gradient())


def test_a_movement_that_comes_in_parts_has_the_digest_of_the_whole() -> None:
    values = pseudo_gradient()

    def in_parts(take: Take) -> None:
        for start in range(0, SIZE, 77):
            take(start, values[start : start + 77])

    bad, sums = probe.check_parts(fragment(), in_parts, is_summed=True)
    assert bad is None
    assert probe.digest([sums]) == digest(values)


def test_the_same_values_in_other_places_are_another_movement() -> None:
    """As of replicas that step by signs, or that train other rows of one table."""
    signs = np.where(np.arange(SIZE) % 2, np.float32(0.01), np.float32(-0.01))
    assert digest(signs) != digest(-signs)
    assert digest(signs) != digest(np.random.default_rng(0).permutation(signs))
