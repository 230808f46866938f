"""Labels, settings and names for people, on a real control plane: stored, reported, listed."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.conftest import Shell, until

import atoll
from atoll.core.errors import Conflict

SCRIPT = """
import sys, atoll
lr = float(sys.argv[sys.argv.index("--lr") + 1])
atoll.report_settings(lr=lr, depth=3, path=__import__("pathlib").Path("x"), big=10**40)
for step, loss in enumerate([4 * lr, lr, 2 * lr]):
    atoll.report(step=step, loss=loss)
"""


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[atoll.Client]:
    where = tmp_path_factory.mktemp("experiments")
    script = where / "train.py"
    script.write_text(SCRIPT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATOLL_STATE_DIR", str(where / "state"))
        patch.delenv("ATOLL_URL", raising=False)
        with atoll.Client() as client:
            for lr in (0.1, 0.3):
                training = client.deploy_distributed(
                    f"Exp lr{lr}",
                    command=[sys.executable, str(script), "--lr", str(lr)],
                    labels={"team": "blue & green", "group": "first"},
                    settings={"width": 64},
                )
                training.result(timeout=60)
            until(lambda: len(client.list(settings=["depth=3"])) == 2)
            client.deploy_distributed("other", command=["true"]).result(timeout=60)
            yield client
        Shell(where / "state", where).stop()


def names(trainings: list[atoll.DistributedTraining]) -> list[str]:
    return [training.name for training in trainings]


def test_a_name_is_shown_as_it_was_given_and_found_by_it(client: atoll.Client) -> None:
    training = client.get("Exp lr0.1")
    assert training.name == "Exp lr0.1"
    assert training.spec.name == "exp-lr0-1"
    assert client.get("exp-lr0-1").uid == training.uid


def test_a_name_that_is_too_much_like_another_names_that_one(client: atoll.Client) -> None:
    with pytest.raises(Conflict, match=r"'EXP-lr0-1' is too much like 'Exp lr0\.1', which exists"):
        client.deploy_distributed("EXP-lr0-1", command=["true"])
    with pytest.raises(Conflict, match="a training named 'other' exists"):
        client.deploy_distributed("other", command=["true"])


def test_settings_are_flags_what_was_given_and_what_a_rank_reported(client: atoll.Client) -> None:
    training = client.get("Exp lr0.1")
    assert training.settings == {
        "lr": 0.1,
        "width": 64,
        "depth": 3,
        "path": "x",
        "big": str(10**40),
    }
    assert training.labels == {"team": "blue & green", "group": "first"}


def test_lists_are_filtered_and_sorted_by_all_of_it(client: atoll.Client) -> None:
    both = ["Exp lr0.1", "Exp lr0.3"]
    assert names(client.list(labels={"team": "blue & green"}, sort="setting:lr")) == both
    assert names(client.list(labels=["team"], sort="-setting:lr")) == both[::-1]
    assert names(client.list(settings={"lr": 0.3})) == both[1:]
    assert names(client.list(settings="lr<0.2")) == both[:1]
    assert names(client.list(metrics=["min:loss<=0.1"])) == both[:1]
    assert names(client.list(metrics=["max:loss>1"])) == both[1:]
    assert names(client.list(sort="-loss"))[:2] == both[::-1]
    assert asyncio.run(client.list_async(settings={"lr": 0.3}))[0].name == both[1]
    with pytest.raises(atoll.ValidationError, match="setting"):
        client.list(settings=["=1"])


def test_ps_has_one_row_for_a_group_until_it_is_opened(
    client: atoll.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    shell = Shell(Path(os.environ["ATOLL_STATE_DIR"]), tmp_path)
    rows = shell("ps").stdout.splitlines()[1:]
    assert [row.split()[0] for row in rows] == ["other", "first"]
    assert "2 succeeded" in rows[1]
    assert "atoll ps --group first" in rows[1]
    head, *opened = shell("ps", "--group", "first", "--sort", "min:loss").stdout.splitlines()
    assert "  LR " in head
    assert "MIN LOSS" in head
    assert "WIDTH" not in head  # it is the same in both
    assert [row.split()[:2] for row in opened] == [["Exp", "lr0.1"], ["Exp", "lr0.3"]]
    assert len(json.loads(shell("ps", "--json").stdout)) == 3
    shown = shell("status", "Exp lr0.1").stdout
    assert "settings  lr=0.1 width=64 depth=3" in shown
    assert json.loads(shell("status", "Exp lr0.1", "--json").stdout)["settings"]["lr"] == 0.1
