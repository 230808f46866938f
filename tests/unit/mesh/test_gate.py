"""What `mesh_wait()` promises beside the polling: no exception, a status, one name."""

from __future__ import annotations

import subprocess
import sys

import pytest

import atoll
from atoll.mesh import gate as mesh


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*mesh.HOST_NAMES, *mesh.ENDPOINT_NAMES):
        monkeypatch.delenv(name, raising=False)


def test_nothing_to_wait_for_is_no_status() -> None:
    assert atoll.mesh_wait() is None
    assert atoll.mesh_status() is None


def test_a_timeout_is_a_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NODE_NAME", "host")
    monkeypatch.setenv("BASILICA_RDZV_ENDPOINT", "127.0.0.1:1")
    assert atoll.mesh_wait(timeout=0) is None
    assert atoll.mesh_status() == "timeout"
    assert capsys.readouterr().err.splitlines()[-1].startswith("mesh-wait: TIMEOUT after=0s")


@pytest.mark.parametrize("timeout", [0, -1, float("-inf")])
def test_odd_timeouts_read_once(monkeypatch: pytest.MonkeyPatch, timeout: float) -> None:
    monkeypatch.setenv("NODE_NAME", "host")
    monkeypatch.setenv("BASILICA_RDZV_ENDPOINT", "127.0.0.1:1")
    atoll.mesh_wait(timeout)
    assert atoll.mesh_status() == "timeout"


@pytest.mark.parametrize("value", [float("nan"), None, "soon", 10**400])
def test_a_timeout_that_is_no_number_is_the_default(value: object) -> None:
    assert mesh._seconds(value) == 60


@pytest.mark.parametrize("stderr", ["None", "open('/dev/full', 'w')", "closed"])
def test_a_broken_stderr_is_no_reason_to_fail(stderr: str) -> None:
    code = f"""
import os, sys, atoll
os.environ.update(NODE_NAME="h", BASILICA_RDZV_ENDPOINT="127.0.0.1:1")
closed = open(os.devnull, "w"); closed.close()
keep, sys.stderr = sys.stderr, {stderr}
atoll.mesh_wait(0)
sys.stderr = keep
assert atoll.mesh_status() == "timeout"
os._exit(0)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


ORDERS = [
    "import atoll.mesh_wait; from atoll import mesh_wait",
    "from atoll import mesh_wait; import atoll.mesh_wait",
    "import atoll.mesh.gate, atoll.mesh_wait; from atoll import mesh_wait",
    "import importlib; importlib.import_module('atoll.mesh_wait'); from atoll import mesh_wait",
    "import atoll; atoll.mesh_wait; import atoll.mesh_wait; mesh_wait = atoll.mesh_wait",
    "import atoll.mesh_wait as mesh_wait",
]


@pytest.mark.parametrize("order", ORDERS)
def test_mesh_wait_is_the_function_in_whatever_order_things_are_imported(order: str) -> None:
    code = (
        f"{order}\n"
        "import pickle, atoll, atoll.mesh.gate as home\n"
        "assert mesh_wait is atoll.mesh_wait is home.mesh_wait, mesh_wait\n"
        "assert pickle.loads(pickle.dumps(mesh_wait)) is mesh_wait\n"
        "assert mesh_wait() is None\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_the_command_warns_of_nothing_and_explains_itself() -> None:
    command = [sys.executable, "-W", "error", "-m", "atoll.mesh_wait", "--help"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "--timeout" in done.stdout
    assert done.stderr == ""


def test_the_gate_loads_nothing_heavy() -> None:
    code = (
        "import sys; bare = set(sys.modules); from atoll import mesh_wait; "
        "print(*(set(sys.modules) - bare))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], check=True, capture_output=True, text=True
    )
    loaded = set(done.stdout.split())
    assert "atoll.mesh.gate" in loaded
    assert not loaded & {"msgspec", "http.client", "asyncio", "urllib.parse", "ssl", "json"}
