"""Notebooks show trainings as tables, and nothing that a rank says is markup."""

from __future__ import annotations

import html as standard
import pickle

from hypothesis import given
from hypothesis import strategies as st

from atoll.core import html
from atoll.core.chart import spark_svg
from atoll.core.metrics import LatestMetric
from atoll.core.phase import Phase
from atoll.core.spec import TrainingSpec, WorldSize
from atoll.core.status import LogLine, RankExit, RankStatus, Status, Training, WorldStatus

BAD = "<script>alert(1)</script>\x1b[31m&\"'"
SIZE = WorldSize(min=2, target=3, max=4)


def training(**status: object) -> Training:
    spec = TrainingSpec(name="run", command=["true"], world_size=SIZE, executor="local")
    return Training(namespace="n", uid="u", spec=spec, status=Status(**status))  # type: ignore[arg-type]


@given(st.text())
def test_text_is_escaped_as_the_standard_library_does_and_has_no_controls(text: str) -> None:
    shown = html.text(text)
    assert not set(shown) & set("<>\"'\x00\x1b\n")
    assert standard.unescape(shown) == html.escape_control(text)


def test_nothing_that_a_rank_says_is_markup() -> None:
    ended = RankExit(rank=1, exit_code=1, termination_reason="Error", host=BAD, message=BAD,
                     log_tail=[BAD])  # fmt: skip
    figure = LatestMetric(training="run", uid="u", name=BAD, value="nan", step=3, at=1.0, spark=[])
    shown = [
        LogLine(rank=0, text=BAD)._repr_html_(),
        html.lines_html([LogLine(rank=0, text=BAD)]),
        ended._repr_html_(),
        html.ranks_html([RankStatus(rank=0, message=BAD, node=BAD)]),
        html.training_html(training(phase=Phase.FAILED, root_cause=ended, rank_exits=[ended])),
        html.training_html(training(phase=Phase.READY, message=BAD), [figure]),
    ]
    for each in shown:
        assert "<script" not in each
        assert "\x1b" not in each
    assert "&lt;script&gt;" in shown[0]
    assert "nan" in shown[-1]


def test_a_world_and_a_training_say_how_they_are() -> None:
    below = WorldStatus.of(1, SIZE)._repr_html_()
    assert "1 of 3" in below
    assert "below minimum" in below
    ranks = [RankStatus(rank=n, phase="Running") for n in range(200)]
    ranks[150] = RankStatus(rank=150, phase="Failed", message="gone")
    page = html.training_html(training(phase=Phase.READY, ranks=ranks))
    assert "gone" in page, "the one that is not like the rest is among those shown"
    assert "and 184 more" in page
    assert len(page) < 10_000


def test_long_logs_show_their_end_and_say_so() -> None:
    lines = [LogLine(rank=0, text=f"line {n}") for n in range(2_000)]
    shown = html.HtmlList(lines, html.lines_html)
    assert shown == lines
    assert pickle.loads(pickle.dumps(shown)) == lines
    page = shown._repr_html_()
    assert "line 1999" in page
    assert "line 100<" not in page
    assert "1,500 earlier lines" in page


def test_a_spark_leaves_out_what_is_no_number() -> None:
    assert spark_svg([1.0]) == ""
    assert spark_svg(["nan", "inf"]) == ""
    assert spark_svg([1.0, "nan", 3.0]).count("L") == 1
