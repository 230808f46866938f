"""What others on the machine, or with a token of their own, must not get."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

SECRET = "hunter2-of-the-owner"


@pytest.mark.parametrize(("options", "code"), [((), 2), (("--shared-namespaces",), 0)])
def test_another_namespace_runs_ranks_here_only_if_the_operator_insists(
    lone_atoll: Any, options: tuple[str, ...], code: int
) -> None:
    token = lone_atoll.json("token", "create", "--namespace", "research")["token"]
    with lone_atoll.start("serve", "--port", "0", *options) as server:
        url = json.loads(server.stdout.readline())["url"]
        guest = {"ATOLL_URL": url, "ATOLL_TOKEN": token}
        ran = lone_atoll("run", "--name", "thief", "--", "true", **guest)
        assert ran.returncode == code, ran.stderr
        listed = lone_atoll.json("ps", **guest)
        assert [training["name"] for training in listed] == ["thief"] * (code == 0)
        if code:
            assert "all run as one user" in ran.stderr
            assert "'atoll serve --shared-namespaces' allows it" in ran.stderr
        server.send_signal(signal.SIGINT)
        assert server.wait() == 0


def test_values_of_variables_are_shown_nowhere_and_reach_the_rank(
    atoll: Any, tmp_path: Path
) -> None:
    (tmp_path / "secrets").write_text(f"# mine\nexport KEY='{SECRET}'\n\nPLAIN=a b # comment\n")
    shown = atoll(
        *("run", "--json", "--name", "masked", "--env-file", str(tmp_path / "secrets")),
        *("-e", "TEST_SECRET_*", "-e", "PLAIN=c", "--"),
        *("sh", "-c", 'test "$KEY" = "$TEST_SECRET_A" && test "$PLAIN" = c'),
        TEST_SECRET_A=SECRET,
    )
    assert shown.returncode == 0, shown.stdout
    for words in (("status", "masked"), ("events", "masked"), ("ps",)):
        for form in ((), ("--json",)):
            shown.stdout += atoll(*words, *form).stdout
    assert SECRET not in shown.stdout
    env = atoll.json("status", "masked")["spec"]["env"]
    assert env["KEY"] == env["TEST_SECRET_A"] == "***"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "cannot be read: No such file or directory"),
        ("K=V\nno value\n", "line 2: expected K=V"),
        (f"K='{SECRET}\n", "line 1: expected a closing '"),
        (b"\xff\xfe", "expected a text file in UTF-8"),
    ],
)
def test_a_bad_file_of_variables_is_named_without_its_values(
    atoll: Any, tmp_path: Path, text: str | bytes | None, why: str
) -> None:
    path = tmp_path / "secrets"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    refused = atoll("run", "--env-file", str(path), "--", "true")
    assert refused.returncode == 2
    assert why in refused.stderr
    assert SECRET not in refused.stderr


def test_a_state_directory_that_others_can_write_is_refused_with_what_to_type(
    lone_atoll: Any, tmp_path: Path
) -> None:
    state = tmp_path / "open"
    state.mkdir()
    state.chmod(0o775)
    for words in (("serve", "--port", "0"), ("ps",)):
        refused = lone_atoll(*words, ATOLL_STATE_DIR=str(state))
        assert refused.returncode == 1
        assert f"chmod go-w {state}" in refused.stderr
        assert "Traceback" not in refused.stderr
    assert [p.name for p in state.iterdir() if p.name not in ("server.log", "start.lock")] == []
