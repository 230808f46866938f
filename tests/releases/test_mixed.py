"""A client and a control plane of neighbouring releases: an answer, or one clear sentence."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

import atoll
from atoll.core.errors import AtollError, ValidationError
from atoll.core.model import UNKNOWN_FIELD
from atoll.core.problem import Problem
from atoll.sdk.effects import Send
from atoll.sdk.release import explained
from atoll.sdk.requests import send
from atoll.store.schema import SCHEMA_VERSION
from tests.e2e.conftest import Terminal
from tests.support.release import NEW, NEW_SERVE, OLD_SERVE, Plane, Site, cleared, unpack

OPERATIONS = Path(__file__).with_name("operations.py")
SAID = {
    "list": ["x-a"],
    "scaled": 3,
    "logs": [[0, "rank 0"], [1, "rank 1"], [2, "rank 2"]],
    "tail": ["rank 1"],
    "get": True,
    "reasons": True,
    "metrics": 0,
    "usage": True,
    "out of bounds": [9, 1, 3],
    "cancelled": ["cancelled", 3],
    "over": "cancelled",
    "taken": "Conflict",
    "gone": "NotFound",
    "async": [["worked"], [0, 7, ["x"]]],
}
# Every command that talks to a control plane, its exit code, and what it must say.
COMMANDS: tuple[tuple[str, int, str], ...] = (
    ("up -n 2 --name c -- sh -c 'echo hello; exec sleep 600'", 0, "c"),
    ("wait c --for target", 0, ""),
    ("ps", 0, "c "),
    ("status c", 0, "2/2"),
    ("scale c 9", 1, ""),
    ("events c", 0, "Normal"),
    ("logs c --tail 1", 0, "hello"),
    ("top --count 1 --json", 0, '"c"'),
    ("cancel c", 0, "c"),
    ("rm c", 0, "c"),
    ("status c", 1, "not found"),
    ("run -n 2 --name d -- sh -c 'exit 3'", 1, "exited with code 3"),
    ("rm d", 0, "d"),
)


@pytest.fixture
def sites(tmp_path: Path) -> Iterator[tuple[Site, Site]]:
    """The old release and the new one, on one state directory."""
    state = tmp_path / "state"
    with cleared(state):
        yield Site(unpack(tmp_path / "old"), state), Site(NEW, state)


def use(client: Site) -> None:
    """All of it, as a program and as a person would."""
    assert client.script(OPERATIONS, "x") == SAID
    for line, code, words in COMMANDS:
        done = client.atoll(*shlex.split(line))
        assert done.returncode == code, (line, done)
        assert words in done.stdout + done.stderr, (line, done)
        assert "Traceback" not in done.stderr, (line, done)
        assert "control plane is" not in done.stderr, "scripts are not disturbed"


def refusal(plane: Plane, request: Send) -> AtollError:
    with atoll.Client(plane.url, plane.token) as client, pytest.raises(AtollError) as refused:
        client.run(send(request))
    return refused.value


def test_an_older_client_and_a_newer_control_plane(sites: tuple[Site, Site]) -> None:
    old, new = sites
    plane = new.start(*NEW_SERVE)
    use(old)
    # Tokens are kept in the file, which is of the newer release.
    done = old.atoll("token", "list")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert f"has schema version {SCHEMA_VERSION}, this atoll knows 1" in done.stderr
    plane.stop()


def test_a_newer_client_and_an_older_control_plane(sites: tuple[Site, Site]) -> None:
    old, new = sites
    plane = old.start(*OLD_SERVE)
    use(new)
    assert "local user" in new.atoll("token", "list").stdout
    why = f"(the control plane is atoll 0.1, this is atoll {atoll.__version__}; restart it"
    refused = refusal(plane, Send("GET", "/v1/trainings", {"later": 1}))
    assert isinstance(refused, ValidationError)
    assert f"there is no such field {why}" in str(refused)
    assert why in str(refusal(plane, Send("GET", "/v1/later")))
    told_how_to_restart(new, plane)


def told_how_to_restart(new: Site, plane: Plane) -> None:
    """Who reads along is told once; the control plane that is started then is the new one."""

    def ps() -> str:
        command = [new.python, "-m", "atoll.cli", "ps"]
        terminal = Terminal(command, new.state.parent, new.env | {"TERM": "xterm"})
        assert terminal.code() == 0
        return terminal.text

    text = ps()
    assert text.count(f"atoll 0.1, this is atoll {atoll.__version__}") == 1
    assert f"'kill {plane.process.pid}' stops it" in text
    plane.stop()
    assert "this is atoll" not in ps()


def test_a_refusal_names_the_release_only_where_that_may_be_why() -> None:
    unknown = Problem(title="", status=400, detail="no", expected=UNKNOWN_FIELD)
    path = Problem(title="NotFound", status=404, detail="no")
    missing = Problem(title="NotFound", status=404, detail="no", type="urn:atoll:NotFound")
    assert explained(unknown, atoll.__version__) == unknown
    assert explained(missing, "0.1.7") == missing
    assert "atoll 0.1.7, this is atoll" in explained(path, "0.1.7").detail
    assert "restart it with this one" in explained(unknown, "0.1.10").detail
    assert "install that one here" in explained(unknown, "10.0.0").detail
