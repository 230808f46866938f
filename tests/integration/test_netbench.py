"""The link bench on a shaped link between two namespaces, beside iperf3, and on loopback."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bench.netns import Network

from atoll.bench import netbench
from atoll.core.errors import Temporary
from atoll.core.model import decode
from atoll.core.status import BenchResult

SRC = Path(__file__).parents[2] / "src"
ENV = {**os.environ, "PYTHONPATH": str(SRC)}
PIPES: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": ENV}
NETBENCH = (sys.executable, "-m", "atoll.bench.netbench")


@pytest.fixture
def net() -> Iterator[Network]:
    reason = Network.why_not() or ("" if shutil.which("iperf3") else "iperf3 is not installed")
    if reason:
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    with Network(2, tag="b") as network:
        yield network


def iperf3(net: Network) -> float:
    """Gbit/s that arrived."""
    with net.popen("host-1", "iperf3", "-s", "-1", "--forceflush", **PIPES) as server:
        assert server.stdout is not None
        while "listening" not in server.stdout.readline():
            pass
        client = net.popen(
            "host-2", "iperf3", "-c", net.address("host-1"), "-t", "3", "-O", "1", "-J", **PIPES
        )
        out, err = client.communicate(timeout=60)
        assert client.returncode == 0, err
        server.communicate(timeout=60)
    return float(json.loads(out)["end"]["sum_received"]["bits_per_second"]) / 1e9


def ours(net: Network) -> BenchResult:
    server = net.popen("host-1", *NETBENCH, "serve", "--address", net.address("host-1"), **PIPES)
    assert server.stdout is not None
    place = json.loads(server.stdout.readline())
    client = net.popen(
        "host-2", *NETBENCH, "measure", f"{net.address('host-1')}:{place['port']}",
        "--token", place["token"], "--host", "host-2", "--peer-host", "host-1", **PIPES,
    )  # fmt: skip
    out, err = client.communicate(timeout=90)
    assert client.returncode == 0, err
    server.communicate(timeout=60)
    assert server.returncode == 0
    return decode(out, BenchResult)


def test_agrees_with_iperf3_on_a_shaped_link_within_a_tenth(net: Network) -> None:
    for host in net.hosts:
        net.shape(host, "tbf", "rate", "100mbit", "burst", "64k", "latency", "50ms")
    truth, result = iperf3(net), ours(net)
    assert result.busbw_gbps_p50 == pytest.approx(truth, rel=0.1)
    assert result.algbw_gbps_p50 == pytest.approx(truth, rel=0.1)
    assert (result.probe_node_a, result.probe_node_b) == ("host-2", "host-1")
    # 1 MiB at that rate, one way; few samples, so a busy machine shows.
    assert result.latency_us_at_1mib == pytest.approx(8 * 2**20 / truth / 1e3, rel=0.4)
    assert max(result.size_bytes_swept) < netbench.SIZES[-1]  # a slow link is not sent 64 MiB
    assert [size for size, _ in result.points] == result.size_bytes_swept


def test_the_slower_direction_counts(net: Network) -> None:
    net.shape("host-1", "tbf", "rate", "50mbit", "burst", "32k", "latency", "50ms")
    net.shape("host-2", "tbf", "rate", "400mbit", "burst", "64k", "latency", "50ms")
    result = ours(net)
    assert result.busbw_gbps_p50 == pytest.approx(0.05, rel=0.1)


def test_the_two_pods_of_a_bench_job_measure_and_report(tmp_path: Path) -> None:
    with netbench.listen("127.0.0.1") as free:
        port = free.getsockname()[1]
    report = tmp_path / "termination-log"
    pods = [
        subprocess.Popen(
            [*NETBENCH, "pair", f"127.0.0.1:{port}", "--limit=30", f"--report={report}"],
            env=ENV
            | {
                "JOB_COMPLETION_INDEX": index,
                "ATOLL_BENCH_TOKEN": "t",
                "NODE_NAME": f"node-{index}",
            },
            stdout=subprocess.DEVNULL,
        )
        for index in ("1", "0")  # the one that measures waits for the one that listens
    ]
    assert [pod.wait(60) for pod in pods] == [0, 0]
    result = decode(report.read_bytes(), BenchResult)
    assert result.probe_node_a == "node-1"
    assert result.busbw_gbps_p50


def test_loopback_says_which_host_it_was() -> None:
    out = subprocess.run(
        [*NETBENCH, "loopback", "--host", "gpu-7"], check=True, capture_output=True, env=ENV
    ).stdout
    result = decode(out, BenchResult)
    assert (result.probe_node_a, result.probe_node_b) == ("gpu-7", "gpu-7")
    assert result.busbw_gbps_p10 is not None
    assert result.busbw_gbps_p50 is not None
    assert result.busbw_gbps_p90 is not None
    assert 0 < result.busbw_gbps_p10 <= result.busbw_gbps_p50 <= result.busbw_gbps_p90
    assert result.size_bytes_swept


@contextlib.contextmanager
def listening() -> Iterator[socket.socket]:
    with netbench.listen("127.0.0.1") as listener:
        yield listener


def test_a_peer_that_says_nothing_is_told_as_such_in_time() -> None:
    with listening() as listener, pytest.raises(Temporary, match="in time"):
        netbench.measure("127.0.0.1", listener.getsockname()[1], "t", limit_s=0.3)


def test_nobody_there_is_temporary() -> None:
    with listening() as listener:
        port = listener.getsockname()[1]
    with pytest.raises(Temporary, match=f"port {port}"):
        netbench.measure("127.0.0.1", port, "t", limit_s=2)


def test_a_wrong_token_is_not_served_and_the_right_one_still_is() -> None:
    errors: list[Exception] = []

    def serve() -> None:
        try:
            netbench.serve(listener, "right", 20)
        except Temporary as error:
            errors.append(error)

    with listening() as listener:
        port = listener.getsockname()[1]
        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(Temporary):
            netbench.measure("127.0.0.1", port, "wrong", limit_s=5)
        with socket.create_connection(("127.0.0.1", port)) as link:
            link.sendall(netbench._GREETING + b"right\n" + netbench._HEAD.pack(b"Q", 0, 0))
            thread.join(60)
        assert not thread.is_alive()
    assert errors == []


def test_a_server_nobody_comes_to_ends() -> None:
    with listening() as listener, pytest.raises(Temporary, match="no peer connected"):
        netbench.serve(listener, "t", 0.1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["serve", "--address", "192.0.2.1"], "netbench: .*192.0.2.1"),
        (["measure", "127.0.0.1:1", "--token", "x"], "netbench: 127.0.0.1 port 1"),
        (["measure", "127.0.0.1:1", "--token", "x", "--limit", "nan"], "'nan': expected seconds"),
        (["loopback", "--limit", "-1"], "'-1': expected seconds"),
    ],
)
def test_the_command_says_in_a_line_why_not(words: list[str], said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "atoll.bench.netbench", *words],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode
    assert re.search(said, done.stderr.splitlines()[-1]), done.stderr
    assert "Traceback" not in done.stderr
