"""The gate against a real etcd, and against servers that misbehave, from Python and from sh."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from atoll.backends.local.etcd_server import start_etcd, stop_etcd
from atoll.core.mesh import degraded_path, escaped, ready_path, split_endpoint

SRC = Path(__file__).parents[2] / "src"
SCRIPT = SRC / "atoll/mesh/mesh_wait.sh"
TOOLS = ("date", "grep", "od", "printf", "sed", "sleep", "timeout", "tr")


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = start_etcd(tmp_path_factory.mktemp("etcd") / "data")
    yield server.endpoint
    stop_etcd(server)


def put(endpoint: str, path: str) -> None:
    url = f"http://{endpoint}{path}"
    request = urllib.request.Request(url, data=b"value=1", method="PUT")
    with urllib.request.urlopen(request, timeout=5):
        pass


class Gate:
    """One way of waiting at the gate, in its own process, as a rank does it."""

    def __init__(self, command: list[str], path: str = os.environ["PATH"]) -> None:
        self.command = command
        self.path = path

    def start(self, timeout: float | str, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*self.command, str(timeout)],
            env={"PATH": self.path, "PYTHONPATH": str(SRC), **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait(self, timeout: float, **env: str) -> str:
        """What it wrote to stderr; it must exit 0 and be silent on stdout."""
        return self.finish(self.start(timeout, **env))

    def finish(self, process: subprocess.Popen[str]) -> str:
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert out == ""
        return err

    def wait_each(self, timeout: float, envs: list[dict[str, str]]) -> list[str]:
        """Several at once, as most of it is waiting."""
        return [self.finish(each) for each in [self.start(timeout, **env) for env in envs]]


@pytest.fixture(params=["python", "curl", "wget", "nc", "busybox"])
def gate(request: pytest.FixtureRequest, tmp_path: Path) -> Gate:
    """`python -m atoll.mesh_wait`, or the script in a PATH where only that tool is found."""
    if request.param == "python":
        return Gate([sys.executable, "-m", "atoll.mesh_wait", "--timeout"])
    tool = shutil.which(request.param)
    if tool is None:
        if os.environ.get("CI"):
            pytest.fail(f"{request.param} is not installed")
        pytest.skip(f"{request.param} is not installed")
    for name in TOOLS:
        if found := shutil.which(name):
            (tmp_path / name).symlink_to(found)
    (tmp_path / ("wget" if request.param == "busybox" else request.param)).symlink_to(tool)
    shell = shutil.which("dash") or "/bin/sh"
    return Gate([shell, str(SCRIPT)], str(tmp_path))


def lines(err: str) -> list[str]:
    return [line.removeprefix("mesh-wait: ").split()[0] for line in err.splitlines()]


def test_a_ready_host_passes(gate: Gate, etcd: str) -> None:
    put(etcd, ready_path("host-1"))
    err = gate.wait(30, NODE_NAME="host-1", BASILICA_RDZV_ENDPOINT=etcd)
    assert lines(err) == ["BEGIN", "OK"]
    assert "OK after=0s" in err or "OK after=1s" in err


def test_a_degraded_host_passes_and_is_told(gate: Gate, etcd: str) -> None:
    put(etcd, degraded_path("host-2"))
    err = gate.wait(30, KUBERNETES_NODE_NAME="host-2", BASILICA_RDZV_ENDPOINT=etcd)
    assert lines(err) == ["BEGIN", "DEGRADED"]


def test_a_key_that_comes_late_ends_the_wait(gate: Gate, etcd: str) -> None:
    host = f"late-{Path(gate.command[0]).name}-{time.monotonic_ns()}"
    process = gate.start(50, NODE_NAME=host, BASILICA_RDZV_ENDPOINT=etcd)
    assert process.stderr is not None
    assert process.stderr.readline().startswith("mesh-wait: BEGIN")
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    put(etcd, ready_path(host))
    _, err = process.communicate(timeout=30)
    assert lines(err) == ["OK"]


@pytest.mark.parametrize("timeout", ["08", "99999999999999999999", "", "soon"])
def test_any_timeout_is_waited_for_or_the_default(gate: Gate, etcd: str, timeout: str) -> None:
    host = f"odd-{time.monotonic_ns()}"
    process = gate.start(timeout, NODE_NAME=host, BASILICA_RDZV_ENDPOINT=etcd)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    put(etcd, ready_path(host))
    assert lines(gate.finish(process)) == ["BEGIN", "OK"]


@pytest.mark.parametrize("timeout", ["-5", "000", "0.0"])
def test_no_time_at_all_is_one_look(gate: Gate, etcd: str, timeout: str) -> None:
    process = gate.start(timeout, NODE_NAME="nobody", BASILICA_RDZV_ENDPOINT=etcd)
    assert lines(gate.finish(process)) == ["BEGIN", "TIMEOUT"]


def test_host_names_that_need_escaping(gate: Gate, etcd: str) -> None:
    hosts = ["a b", "gpu/1", "é-ü", "100%", "?x=1#y"]
    for host in hosts:
        put(etcd, ready_path(host))
    envs = [{"NODE_NAME": host, "BASILICA_RDZV_ENDPOINT": etcd} for host in hosts]
    assert [lines(err) for err in gate.wait_each(5, envs)] == [["BEGIN", "OK"]] * len(hosts)


def test_no_key_is_a_timeout_and_not_an_error(gate: Gate, etcd: str) -> None:
    err = gate.wait(1, NODE_NAME="nobody", BASILICA_RDZV_ENDPOINT=etcd)
    assert lines(err) == ["BEGIN", "TIMEOUT"]


def test_nothing_to_wait_for_says_nothing(gate: Gate) -> None:
    somewhere = {"NODE_NAME": "h", "BASILICA_RDZV_ENDPOINT": "127.0.0.1:1"}
    envs = [
        {"NODE_NAME": "h"},
        {"NODE_NAME": "h", "BASILICA_RDZV_ENDPOINT": ""},
        {"BASILICA_RDZV_ENDPOINT": "127.0.0.1:1"},
        {**somewhere, "ATOLL_MESH_ENDPOINT": ""},
    ]
    assert gate.wait_each(30, envs) == [""] * len(envs)


def test_a_bad_endpoint_is_told_at_once(gate: Gate) -> None:
    endpoints = ["host:port", "host:99999", "[::1", "a/b:1", ":2379", "a b"]
    envs = [{"NODE_NAME": "h", "BASILICA_RDZV_ENDPOINT": each} for each in endpoints]
    for err in gate.wait_each(50, envs):
        assert lines(err) == ["BEGIN", "TIMEOUT"]
        assert "bad endpoint" in err


def test_nobody_there_is_a_timeout(gate: Gate) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, never listening: refused
        refused = f"127.0.0.1:{taken.getsockname()[1]}"
        endpoints = [refused, "no-such-host.invalid:2379"]
        envs = [{"NODE_NAME": "h", "BASILICA_RDZV_ENDPOINT": each} for each in endpoints]
        for err in gate.wait_each(1, envs):
            assert lines(err) == ["BEGIN", "TIMEOUT"]


def test_ipv6(gate: Gate, tmp_path: Path) -> None:
    server = start_etcd(tmp_path / "data6", "::1")
    try:
        put(server.endpoint, ready_path("six"))
        err = gate.wait(20, NODE_NAME="six", BASILICA_RDZV_ENDPOINT=server.endpoint)
    finally:
        stop_etcd(server)
    assert lines(err) == ["BEGIN", "OK"]


def hang(link: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while link.recv(4096):  # reads, and never answers, until the other side gives up
            pass


def trickle(link: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            link.sendall(b"H")
            time.sleep(0.01)


def say(*parts: bytes) -> Callable[[socket.socket], None]:
    def answer(link: socket.socket) -> None:
        link.recv(4096)
        for part in parts:
            link.sendall(part)

    return answer


RUBBISH = {
    "hangs": hang,
    "trickles": trickle,
    "closes": lambda link: None,
    "500": say(b"HTTP/1.1 500 Oh\r\nContent-Length: 3\r\n\r\nno\n"),
    "html 404": say(b"HTTP/1.1 404 Not Found\r\n\r\n<html><body>nothing here</body></html>"),
    "html 302": say(b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\n\r\n<html>"),
    "not http": say(b"SSH-2.0-OpenSSH_9.2\r\n"),
    "bytes": say(bytes(range(128, 256)) * 40),
    "half a head": say(b"HTTP/1."),
    "half a number": say(b"HTTP/1.1 20\r\n\r\n"),
    "half a 404": say(b"HTTP/1.1 404 Not Found\r\nContent-Length: 900\r\n\r\n{"),
}


@contextlib.contextmanager
def serving(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    def run(link: socket.socket) -> None:
        with link, contextlib.suppress(OSError):
            answer(link)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                link, _ = listener.accept()
                threading.Thread(target=run, args=[link], daemon=True).start()

    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(60)


def test_a_server_that_misbehaves_is_a_timeout_in_time(gate: Gate) -> None:
    with contextlib.ExitStack() as servers:
        endpoints = [servers.enter_context(serving(answer)) for answer in RUBBISH.values()]
        envs = [{"NODE_NAME": "h", "BASILICA_RDZV_ENDPOINT": each} for each in endpoints]
        errs = gate.wait_each(1, envs)  # some of them would last for ever
    outcomes = {kind: lines(err) for kind, err in zip(RUBBISH, errs, strict=True)}
    assert outcomes == dict.fromkeys(RUBBISH, ["BEGIN", "TIMEOUT"])


def test_200_with_half_a_body_counts_as_200() -> None:
    torn = say(b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n{")
    with serving(torn) as endpoint:
        gate = Gate([sys.executable, "-m", "atoll.mesh_wait", "--timeout"])
        assert "OK" in gate.wait(5, NODE_NAME="host", BASILICA_RDZV_ENDPOINT=endpoint)


def test_the_key_that_is_there_costs_one_request() -> None:
    asked: list[bytes] = []

    def answer(link: socket.socket) -> None:
        asked.append(link.recv(4096).split(b"\r\n")[0])
        link.sendall(b"HTTP/1.1 200 OK\r\n\r\n{}")

    with serving(answer) as endpoint:
        gate = Gate([sys.executable, "-m", "atoll.mesh_wait", "--timeout"])
        gate.wait(5, NODE_NAME="host", BASILICA_RDZV_ENDPOINT=endpoint)
    assert asked == [b"GET /v2/keys/basilica/mesh-ready/host HTTP/1.1"]


def test_the_escaping_is_that_of_the_standard_library() -> None:
    from urllib.parse import quote

    text = "".join(map(chr, range(1, 0x250))) + "\udc80"
    assert escaped(text) == quote(text.encode("utf-8", "surrogateescape"), safe="")


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("etcd", ("etcd", 2379)),
        ("etcd:80", ("etcd", 80)),
        ("10.0.0.1:2379", ("10.0.0.1", 2379)),
        ("[::1]:99", ("::1", 99)),
        ("[fe80::1]", ("fe80::1", 2379)),
        ("::1", ("::1", 2379)),
        ("http://etcd:80/", ("etcd", 80)),
        ("https://etcd", None),
        ("etcd:0", None),
        ("etcd:-1", None),
        ("etcd:1e3", None),
        ("", None),
        ("[::1]x", None),
    ],
)
def test_endpoints(given: str, meant: tuple[str, int] | None) -> None:
    assert split_endpoint(given) == meant
