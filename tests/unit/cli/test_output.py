"""Lists of trainings: columns that somebody wants, in the space that there is."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from atoll.cli import output
from atoll.cli.follow import TextReport
from atoll.core.metrics import LatestMetric
from atoll.core.phase import Phase
from atoll.core.rounds import RankRounds, RoundSummary, with_rounds
from atoll.core.select import Selection
from atoll.core.spec import TrainingSpec, WorldSize
from atoll.core.status import LogLine, RankExit, Status, Training

FLAGS = [f"--flag_{number}={number}" for number in range(1, 31)]
TRACEBACK = ["Traceback (most recent call last):", '  File "t.py", line 1', "ValueError: no"]


def training(name: str = "t", *flags: str, phase: Phase = Phase.READY, **more: Any) -> Training:
    command = ["/home/me/env/bin/python3.11", "train.py", *flags]
    size = WorldSize(min=1, target=1, max=1)
    given = {name: more.pop(name, {}) for name in ("settings", "labels")}
    spec = TrainingSpec(name=name, world_size=size, command=command, **given)
    return Training(namespace="default", uid=name, spec=spec, status=Status(phase=phase, **more))


def metric(value: float, name: str = "loss") -> LatestMetric:
    return LatestMetric("t", "t", name, value=value, step=1, at=1.0, min=value, max=value)


def experiment(trainings: list[Training], values: Any = None, **more: Any) -> list[str]:
    more = {"has_settings": True, **more}
    return output.experiment_table(trainings, values or {}, **more).splitlines()


def test_a_list_without_a_row_has_its_heading() -> None:
    assert output.ps_table([]).split() == [*output.PS]
    assert experiment([])[0].split() == [*output.PS]


def test_a_command_is_shown_from_its_program_on() -> None:
    assert "  python3.11 train.py --lr 1" in output.ps_table([training("t", "--lr", "1")])
    assert "/home/me/env/bin/python3.11 train.py" in output.status_text(training())


def test_a_list_is_as_wide_as_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    rows = output.ps_table([training("a-name-of-twenty-two-x", *FLAGS)]).splitlines()
    assert max(map(len, rows)) == 80
    swept = training("t", labels={"group": "a-long-name-of-a-sweep"})
    assert output.ps_table([swept]).endswith("  atoll ps --group a-long-name-of-a-sweep")


def test_a_name_longer_than_a_label_is_shown_as_its_label() -> None:
    long = training("x" * 190)
    (_, row) = output.ps_table([long]).splitlines()
    assert row.split()[0] == long.name
    assert len(long.name) <= 63


def test_one_training_has_the_settings_that_it_was_asked_for() -> None:
    one = training("t", *FLAGS)
    asked = Selection.parse(settings=["flag_3>1"])
    assert experiment([one], selection=asked)[0].split()[5:] == ["FLAG_3"]
    swept = training("t", *FLAGS, settings={"lr": 0.1})
    assert experiment([swept])[0].split()[5:] == ["LR"]


def test_letters_that_are_two_columns_wide_keep_the_columns_in_line() -> None:
    lines = output.table(
        ("A", "B"), [("日本", "x"), ("e\u0301te", "x"), ("four", "x")]
    ).splitlines()
    assert lines == ["A     B", "日本  x", "e\u0301te   x", "four  x"]


def test_no_column_takes_the_place_of_another() -> None:
    """Programs have a --name, and report the learning rate that they were given."""
    one = training("t", settings={"lr": 0.5, "LR": 3, "name": "exp"})
    head, row = experiment([one], {"t": {"lr": metric(0.25, "lr")}})
    assert head.split()[:1] + head.split()[5:] == (
        "NAME LR SETTING LR SETTING NAME LAST LR".split()
    )
    assert row.split()[:1] + row.split()[5:] == ["t", "0.5", "3", "exp", "0.25"]


def test_what_one_has_not_reported_yet_does_not_vary() -> None:
    early = training("t", "--lr=1")
    other = training("u", "--lr=1", "--fast", settings={"width": 2})
    other = replace(other, status=replace(other.status, settings={"lr": 1, "seed": 3}))
    assert output.varied_settings([early, other]) == ["width", "fast"]
    third = training("v", "--lr=2", "--fast", settings={"width": 2})
    assert output.varied_settings([other, third]) == ["lr"]


def test_a_condition_on_the_lowest_value_shows_it() -> None:
    values = {"t": {"loss": metric(0.5), "acc": metric(0.5, "acc")}}
    asked = Selection.parse(metrics=["min:loss<1"])
    head = experiment([training()], values, selection=asked, has_settings=False)[0]
    assert head.split()[5:] == ["LOSS", "MIN", "LOSS", "ACC", "COMMAND"]


def test_a_terminal_has_the_columns_that_fit_and_counts_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(output, "can_redraw", lambda stream: True)
    monkeypatch.setenv("COLUMNS", "80")
    both = [training("t", *FLAGS), training("u", *(f"{flag}0" for flag in FLAGS))]
    values = {"t": {"loss": metric(0.5), "machine/cpu": metric(1.0, "machine/cpu")}}
    head, *rows, note = experiment(both, values, selection=Selection.parse(sort="min:loss"))
    assert max(map(len, (head, *rows))) <= 80
    assert head.split()[-3:] == ["LOSS", "MIN", "LOSS"]
    assert "FLAG_1 " in head
    count = int(note.split()[0])
    assert count + head.count("FLAG_") == 30
    assert "--json" in note
    assert "MACHINE" not in head


def failed(tail: list[str]) -> Training:
    cause = RankExit(rank=0, exit_code=1, termination_reason="Error", log_tail=tail)
    return training(phase=Phase.FAILED, root_cause=cause, rank_exits=[cause])


def test_a_traceback_among_lines_of_other_ranks_is_printed_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = TextReport()
    for text in TRACEBACK:
        for rank in (0, 1):
            report.line(LogLine(rank=rank, text=text))
    report.end(failed(TRACEBACK), 1)
    assert "last lines" not in capsys.readouterr().err
    for number in range(50):
        report.line(LogLine(rank=1, text=str(number)))
    report.end(failed(TRACEBACK), 1)
    assert "ValueError: no" in capsys.readouterr().err  # the first has left the screen


def test_following_says_which_ranks_stall() -> None:
    assert output.world_text(training(stalled={0: 9.0})) == "ready 0/1, stalled: rank 0"


def test_settings_are_broken_where_a_terminal_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    one = training("t", *FLAGS)
    (line,) = [line for line in output.status_text(one).splitlines() if "flag_30=30" in line]
    assert line.startswith("  settings  flag_1=1 ")
    monkeypatch.setattr(output, "can_redraw", lambda stream: True)
    monkeypatch.setenv("COLUMNS", "80")
    (last,) = [line for line in output.status_text(one).splitlines() if "flag_30=30" in line]
    assert last.startswith(" " * 12 + "flag_")
    assert len(last) <= 80


def test_a_run_that_goes_on_counts_the_ranks_of_this_training() -> None:
    ranks = [RankRounds(rank=rank, rounds=9 - rank, last=8) for rank in range(3)]
    numbers = {"round": 8, "rounds": 9, "fragments": 1, "tokens": 0.0}
    nobody = {name: [] for name in ("members", "behind", "uploaded", "waited_for")}
    times = {"moved_at": None, "observed_at": None}
    summary: Any = {"run": "exp", "source": "store", "ranks": ranks, **numbers, **nobody, **times}
    two = replace(training().spec, run_id="exp", world_size=WorldSize(min=2, target=2, max=2))
    resumed = Training(namespace="default", uid="t", spec=two)
    lines = output.participation_lines(with_rounds(resumed, RoundSummary(**summary)))
    assert lines == ["run exp: rounds that each rank took part in, of 9: rank 0: 9; rank 1: 8"]
