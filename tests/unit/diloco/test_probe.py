"""Digests by which replicas find out that they moved alike: equal for equal movements only."""

from __future__ import annotations

import numpy as np
import pytest

from atoll.diloco import probe
from atoll.diloco.model import ModelFragment, split
from atoll.diloco.outer import Floats, OuterConfig, OuterRows
from atoll.diloco.round.cells import Cut, Share

SIZE = 1000


def fragment(process: int = 0, processes: int = 1) -> ModelFragment:
    complete = split([("a", (700,)), ("b", (300,))], 1)[0]
    share = Share(Cut(SIZE, 3, 24), process, processes)
    complete.carry(share, OuterRows(share.size, OuterConfig()))
    return complete


def digest(values: Floats, processes: int = 1) -> str:
    sums = []
    for process in range(processes):
        part = fragment(process, processes)
        row = probe.RowProbe(part, is_summed=True)
        row.take(0, values[part.share.start : part.share.stop])
        sums.append(row.sums)
    return probe.digest(sums)


def pseudo_gradient(seed: int = 0) -> Floats:
    return np.random.default_rng(seed).normal(size=SIZE).astype(np.float32)


@pytest.mark.parametrize("processes", [2, 3, 8])
def test_a_movement_has_one_digest_however_the_replica_is_cut(processes: int) -> None:
    assert digest(pseudo_gradient(), processes) == digest(pseudo_gradient())
    assert digest(pseudo_gradient(1), processes) != digest(pseudo_gradient())


def test_a_movement_that_comes_in_parts_has_the_digest_of_the_whole() -> None:
    values = pseudo_gradient()

    row = probe.RowProbe(fragment(), is_summed=True)
    for start in range(0, SIZE, 77):
        row.take(start, values[start : start + 77])
    assert row.bad is None
    assert probe.digest([row.sums]) == digest(values)


@pytest.mark.parametrize(("place", "index"), [(0, 0), (699, 0), (700, 1), (999, 1)])
def test_the_first_parameter_that_is_not_finite_is_found(place: int, index: int) -> None:
    values = pseudo_gradient()
    values[place] = np.nan
    found = []
    for process in range(3):
        part = fragment(process, 3)
        row = probe.RowProbe(part, is_summed=False)
        row.take(0, values[part.share.start : part.share.stop])
        found.append(row.bad)
    assert [each for each in found if each is not None] == [index]


def test_the_same_values_in_other_places_are_another_movement() -> None:
    """As of replicas that step by signs, or that train other rows of one table."""
    signs = np.where(np.arange(SIZE) % 2, np.float32(0.01), np.float32(-0.01))
    assert digest(signs) != digest(-signs)
    assert digest(signs) != digest(np.random.default_rng(0).permutation(signs))
