"""Replicas of several processes in one run: cut differently, killed, resumed, and the same bits."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.forked import run_forked

WORLD = Path(__file__).parent / "group_world.py"
FACTS = ("manifests", "up", "lives")
# Gradients of a batch are summed in another order when it is cut: parameters differ by rounding.
TOLERANCE = 2e-7


pytestmark = pytest.mark.timeout(600)


def run(folder: Path, *worlds: dict[str, Any], timeout: float = 540) -> None:
    done = start(folder, *worlds, timeout=timeout)
    assert done.returncode == 0, done.stderr[-4000:]


def start(folder: Path, *worlds: dict[str, Any], timeout: float) -> Any:
    return run_forked([str(WORLD), str(folder), json.dumps(worlds)], os.environ, timeout)


def results(folder: Path) -> dict[str, Any]:
    files = {file.stem: np.load(file) for file in sorted(folder.glob("*.npz"))}
    assert files
    return files


def agreed(file: Any) -> dict[str, Any]:
    """The global parameters."""
    return {name: file[name] for name in file if name not in FACTS and not name.startswith("own.")}


def check_one(folder: Path, *, is_complete: bool = True) -> dict[str, Any]:
    """All processes agree after every round, and their models hold what they agree on.

    Replicas may end with different rounds: one that is late for the last makes another. Of rounds
    that are not `is_whole`, one fragment is agreed on and the model has trained the others since.
    """
    files = results(folder)
    by_round: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for file in folder.glob("digests.*"):
        for number, digest in json.loads(file.read_text()).items():
            by_round[number][digest].add(file.name.split(".")[1])
    assert all(len(digests) == 1 for digests in by_round.values()), by_round
    assert any(len(ranks) > 1 for digests in by_round.values() for ranks in digests.values())
    for file in files.values() if is_complete else ():
        for name, value in agreed(file).items():
            np.testing.assert_array_equal(file[f"own.{name}"], value)
    return files


def compare(folder: Path, kinds: list[str], **options: Any) -> None:
    options = {"grace_s": 120, **options}
    single = [["plain:1"] for _ in kinds]
    run(
        folder,
        {"name": "cut", "rounds": 2, "options": options, "replicas": [[k] for k in kinds]},
        {"name": "one", "rounds": 2, "options": options, "replicas": single},
    )
    is_complete = "fragments" not in options
    cut, one = (check_one(folder / name, is_complete=is_complete) for name in ("cut", "one"))
    for name, value in agreed(one["0.0"]).items():
        np.testing.assert_allclose(cut["0.0"][name], value, rtol=0, atol=TOLERANCE)
    if not is_complete:
        return  # a fragment of so small a model is mostly headers
    last = len(kinds) - 1
    # Each process carries its part of what a replica of one process carries.
    assert (
        max(cut[f"{last}.{process}"]["up"][1] for process in range(4)) < 0.5 * one["1.0"]["up"][1]
    )


def test_replicas_cut_differently_train_as_single_processes_do(tmp_path: Path) -> None:
    compare(tmp_path, ["ddp:2", "fsdp:2", "fsdp:4"])


@pytest.mark.soak
@pytest.mark.parametrize("options", [{"overlap_steps": 1}, {"fragments": 3}])
def test_replicas_cut_in_two_dimensions_do_too(tmp_path: Path, options: dict[str, Any]) -> None:
    compare(tmp_path, ["plain:1", "ddp:2", "hsdp:4", "fsdp:3", "tp:4"], **options)


def test_a_process_that_dies_takes_its_replica_out_and_the_run_goes_on_in_other_shapes(
    tmp_path: Path,
) -> None:
    options = {"grace_s": 3.0, "codec": "int8", "checkpoint_every": 2, "min_replicas": 1}
    world = {
        "name": "kills",
        "rounds": 8,
        "options": options,
        "replicas": [["plain:1"], ["fsdp:4", "fsdp:2"], ["ddp:2", "plain:1"]],
        "deaths": [[1, 2, 5], [2, 0, 10]],
    }
    # The whole run again, from the store alone, with every replica cut in another way.
    again = {**world, "rounds": 10, "replicas": [["fsdp:2"], ["plain:1"], ["hsdp:4"]]}
    run(tmp_path, world)
    files = check_one(tmp_path / "kills")
    assert {"0.0", "1.0", "1.1", "2.0"} == set(files)
    assert [int(files[name]["lives"]) for name in sorted(files)] == [1, 2, 2, 2]
    for pattern in ("*.npz", "meet.*", "begun.*"):
        for file in (tmp_path / "kills").glob(pattern):
            file.unlink()
    run(tmp_path, {**again, "deaths": []})
    assert {"0.0", "0.1", "1.0", "2.3"} < set(check_one(tmp_path / "kills"))


def test_a_group_that_spans_replicas_and_a_model_that_is_not_wrapped_are_named(
    tmp_path: Path,
) -> None:
    spans = {
        "name": "spans",
        "rounds": 1,
        "options": {"grace_s": 0.5, "min_replicas": 1},
        "replicas": [["ddp:2", "plain:1"], ["plain:1"]],
        "only": [0],
        "spans": True,
    }
    loose = {**spans, "name": "loose", "spans": False, "replicas": [["loose:2", "plain:1"]]}
    done = start(tmp_path, spans, loose, timeout=540)
    assert done.stderr.count("process_group: 'of replicas 0, 1' is not valid") >= 2, done.stderr
    assert "--rendezvous none" in done.stderr
    assert "model.0.weight: 'of process 1' is not valid: expected the values of" in done.stderr


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("codec", ["fp32", "int4"])
def test_two_hundred_kills_of_single_processes(tmp_path: Path, codec: str) -> None:
    world = {
        "name": "soak",
        "rounds": 10,
        "options": {"grace_s": 0.7, "checkpoint_every": 5, "min_replicas": 1, "codec": codec},
        "replicas": [["plain:1"], ["fsdp:2", "fsdp:4"], ["ddp:2", "fsdp:2", "ddp:2"]],
        "kills": 200,
    }
    run(tmp_path, world, timeout=3500)
    check_one(tmp_path / "soak")
    killed = [int(file.read_text()) for file in (tmp_path / "soak").glob("killed.*")]
    assert sum(killed) >= 200


def test_replicas_of_several_processes_share_data(tmp_path: Path) -> None:
    """With DDP each process has its own part; those of a tensor parallel group have the same."""
    world = {
        "name": "data",
        "rounds": 0,
        "data": 101,
        "options": {"grace_s": 120},
        "replicas": [["plain:1"], ["ddp:2"], ["tp:4"]],
    }
    run(tmp_path, world)
    trained: dict[str, list[int]] = {}
    for file in sorted((tmp_path / "data").glob("data.*")):
        _, rank, part, _ = file.name.split(".")
        indices, used, uses = json.loads(file.read_text())
        assert used == 101
        committed = [at for _, part in uses for start, stop in part for at in range(start, stop)]
        assert sorted(committed) == list(range(101))
        assert trained.setdefault(f"{rank}.{part}", indices) == indices
    assert set(trained) == {"0.0", "1.0", "1.1", "2.0", "2.1"}
    by_rank = [{at for k, v in trained.items() if k[0] == r for at in v} for r in "012"]
    # No sample is trained on by two replicas. Processes of one may share the last of a lease.
    assert sum(map(len, by_rank)) == 101
    assert set.union(*by_rank) == set(range(101))
