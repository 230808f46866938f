"""What only a terminal shows: the live line, colours, Ctrl-C, screens."""

from __future__ import annotations

import signal
import sys
from typing import Any

from tests.e2e.conftest import is_alive, until

SLEEPER = "echo up $$; sleep 60"
# It notes that it was asked to stop, and does so when the test says.
STUBBORN = "trap 'touch asked' TERM; echo up $$; until [ -e go ]; do sleep 0.1; done"


def test_the_world_is_a_live_line_below_coloured_logs(atoll: Any) -> None:
    terminal = atoll.in_terminal("run", "-n", "2", "--name", "live", "--", "sh", "-c", SLEEPER)
    for shown in ("── live  ready 2/2", "\x1b[36m[0]\x1b[0m up", "\x1b[33m[1]\x1b[0m up"):
        terminal.read_until(shown)
    terminal.press("\x03")
    assert terminal.code() == 130
    assert terminal.text.rstrip().endswith("atoll: live was cancelled")


def test_ctrl_c_cancels_and_waits_for_the_ranks(atoll: Any) -> None:
    terminal = atoll.in_terminal("run", "--name", "stopped", "--", "sh", "-c", SLEEPER)
    pid = _pid(terminal)
    terminal.press("\x03")
    assert terminal.code() == 130
    assert not is_alive(pid)
    assert "cancelling the training; press Ctrl-C again to leave at once" in terminal.text
    assert atoll.json("status", "stopped")["phase"] == "cancelled"


def test_rm_asks_before_it_stops_a_training(atoll: Any) -> None:
    assert atoll("run", "-d", "--name", "asked-for", "--", "sleep", "60").returncode == 0
    for answer, code, phase in (("n", 1, "ready"), ("y", 0, "gone")):
        terminal = atoll.in_terminal("rm", "asked-for")
        terminal.read_until("asked-for is running: stop and remove? [y/N]")
        terminal.press(f"{answer}\n")
        assert terminal.code() == code
        phases = {each["name"]: each["phase"] for each in atoll.json("ps")}
        assert phases.get("asked-for", "gone") in (phase, "pending" if code else "gone")


def test_a_second_ctrl_c_leaves_at_once_and_the_ranks_are_stopped_all_the_same(atoll: Any) -> None:
    terminal = atoll.in_terminal(
        "run", "--name", "stubborn", "--stop-grace", "60", "--", "sh", "-c", STUBBORN
    )
    pid = _pid(terminal)
    terminal.press("\x03")
    terminal.read_until("press Ctrl-C again to leave at once")
    terminal.press("\x03")
    assert terminal.code() == 128 + signal.SIGINT
    assert "the training is being cancelled" in terminal.text
    assert terminal.text.rfind("\x1b[?25l") < terminal.text.rfind("\x1b[?25h"), "the cursor is back"
    assert "was cancelled" not in terminal.text
    until((atoll.cwd / "asked").exists)
    (atoll.cwd / "go").touch()
    assert atoll("wait", "stubborn").returncode == 1
    until(lambda: not is_alive(pid))


def test_no_color_means_no_colour_but_still_the_line(atoll: Any) -> None:
    terminal = atoll.in_terminal("run", "--name", "plain", "--", "sh", "-c", SLEEPER, NO_COLOR="1")
    terminal.read_until("── plain  ready 1/1")
    terminal.read_until("[0] up")
    assert "\x1b[3" not in terminal.text
    terminal.press("\x03")
    assert terminal.code() == 130


def test_colour_can_be_forced_where_there_is_no_terminal(atoll: Any) -> None:
    assert "\x1b[36m[0]\x1b[0m hi" in atoll("run", "--", "echo", "hi", FORCE_COLOR="1").stdout
    assert "\x1b" not in atoll("run", "--", "echo", "hi").stdout


def test_status_w_draws_until_the_end_and_top_draws_until_ctrl_c(atoll: Any) -> None:
    assert atoll("run", "-d", "--name", "watched", "-n", "2", "--", "sleep", "60").returncode == 0
    top = atoll.in_terminal("top", "--interval", "0.1")
    top.read_until("watched")
    status = atoll.in_terminal("status", "-w", "watched")
    status.read_until("2/2 ready")
    assert atoll("scale", "watched", "3").returncode == 1  # out of its bounds
    assert atoll("cancel", "watched").returncode == 0
    assert status.code() == 0
    assert "was cancelled" in status.text
    assert "\x1b[?1049l" not in status.text.rpartition("was cancelled")[2], "told after the screen"
    top.press("\x03")
    assert top.code() == 130
    assert top.text.rstrip().endswith("\x1b[?25h\x1b[?1049l")
    assert atoll("rm", "-f", "watched").returncode == 0


def test_what_is_not_drawn_on_a_terminal_loads_nothing_that_draws(atoll: Any) -> None:
    assert atoll("run", "--name", "lean", "--", "true").returncode == 0
    traced = {"PYTHONPROFILEIMPORTTIME": "1"}
    follow = ("run", "--name", "lean-2", "--", "true")
    for words in (("--help",), ("ps",), ("status", "lean", "--json"), ("top",), follow):
        done = atoll(*words, **traced)
        assert done.returncode == 0, done.stderr
        loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
        assert "atoll.cli.main" in loaded
        assert not {name for name in loaded if name.partition(".")[0] == "rich"}, words
    dumb = atoll.in_terminal("status", "lean", TERM="dumb", **traced)
    assert dumb.code() == 0
    assert " rich" not in dumb.text


def test_a_narrow_terminal_gets_one_line_and_whole_log_lines(atoll: Any) -> None:
    program = f"echo {'long ' * 20}; sleep 60"
    name = "a-training-with-a-name-of-more-than-forty-columns"
    terminal = atoll.in_terminal("run", "--name", name, "--", "sh", "-c", program, COLUMNS="40")
    terminal.read_until("[0]")
    terminal.read_until(f"── {name[:37]}")
    assert name not in terminal.text
    assert "long " * 19 in terminal.text, "a terminal breaks it, so it can be copied whole"
    terminal.press("\x03")
    assert terminal.code() == 130
    assert atoll("rm", "-f", name).returncode == 0


def test_a_dumb_terminal_gets_changes_as_lines(atoll: Any) -> None:
    terminal = atoll.in_terminal("run", "--name", "dumb", "--", "sh", "-c", SLEEPER, TERM="dumb")
    terminal.read_until("atoll: dumb ready 1/1")
    terminal.press("\x03")
    assert terminal.code() == 130
    assert "\x1b" not in terminal.text
    assert "\x1b" not in _in_terminal(atoll, "top", TERM="dumb")


def test_a_progress_bar_shows_as_it_would_have_been_left(atoll: Any) -> None:
    bar = r"printf '10%%\r50%%\r100%%\n'; sleep 60"
    terminal = atoll.in_terminal("run", "--name", "bar", "--", "sh", "-c", bar)
    terminal.read_until("100%")
    assert "50%" not in terminal.text
    terminal.press("\x03")
    assert terminal.code() == 130


def _pid(terminal: Any) -> int:
    """Of the rank, as it said."""
    terminal.read_until("── ")
    until(lambda: "up " in terminal._read())
    return int(terminal.text.split("up ")[1].split()[0])


EVIL = r"printf '\033]0;owned\007\033]52;c;eA==\007\033[31mred\033[2J\033[5A\n'; exit 3"


def test_a_terminal_gets_no_escape_of_a_rank_but_colours(atoll: Any) -> None:
    terminal = atoll.in_terminal("run", "--name", "evil", "--", "sh", "-c", EVIL)
    terminal.read_until("evil failed")
    assert terminal.code() == 1
    assert "\x1b[31mred\x1b[0m" in terminal.text
    for shown in (terminal.text, _in_terminal(atoll, "logs", "evil")):
        assert "owned" not in shown.replace(EVIL, "").replace("\\x1b]0;owned", "")
        for sequence in ("\x1b]", "\x1b[2J", "\x1b[5A", "\x07"):
            assert sequence not in shown
    assert "\x1b]0;owned" in atoll("logs", "evil").stdout  # a file gets every byte


def test_an_escape_in_a_command_breaks_no_table(atoll: Any) -> None:
    for name, word in (
        ("esc", "\x1b[2Jforged\x1b]0;t\x07"),
        ("m", "\x1b[31m"),
        ("esc-only", "\x1b"),
    ):
        assert atoll("run", "--name", name, "--", "echo", word).returncode == 0
    for command in (("ps",), ("status", "esc"), ("events", "esc"), ("top",)):
        listed = atoll(*command)
        assert listed.returncode == 0, listed.stderr
        assert "\x1b" not in listed.stdout
    assert "\\x1b[2Jforged" in atoll("ps").stdout


def _in_terminal(atoll: Any, *words: str, **env: str) -> str:
    terminal = atoll.in_terminal(*words, **env)
    assert terminal.code() == 0
    text: str = terminal.text
    return text


def test_top_shows_what_ranks_use_and_their_loss_and_leaves_the_screen_as_it_was(
    atoll: Any,
) -> None:
    program = "import atoll, time\nfor n in range(20): atoll.report(step=n, loss=20.0 - n)\n"
    (atoll.cwd / "lossy.py").write_text(program + "time.sleep(600)\n")
    made = atoll("run", "-d", "--name", "lossy", "-n", "2", "--", sys.executable, "lossy.py")
    assert made.returncode == 0, made.stderr
    until(lambda: _figures(atoll).keys() >= {"loss", "machine/cpu", "machine/memory"})
    assert _figures(atoll)["loss"]["value"] == 1.0
    once = atoll("top", "--count", "1")
    assert "\x1b" not in once.stdout, "no colour where there is no terminal"
    assert "█" in once.stdout
    assert "M" in once.stdout.split("MEMORY")[1]
    top = atoll.in_terminal("top", "--interval", "60")
    top.read_until("q quits")
    assert top.text.startswith("\x1b[?1049h")
    assert "█" in top.text
    drawn = top.text.count("q quits")
    top.resize(60, 12)
    until(lambda: top._read().count("q quits") > drawn)
    last = top.text.rpartition("\x1b[H")[2]
    assert "more lines" in last
    top.press("q")
    assert top.code() == 0
    assert top.text.endswith("\x1b[?1049l")
    assert atoll("rm", "-f", "lossy").returncode == 0


def _figures(atoll: Any) -> dict[str, Any]:
    [found] = [each for each in atoll.json("top") if each["name"] == "lossy"]
    figures: dict[str, Any] = found["metrics"]
    return figures
