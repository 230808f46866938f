"""The user's own control plane: started once, found by all, replaced when it is dead."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import httpx2
import pytest
from tests.support.foreign_listener import needs_root

import atoll
from atoll.core.errors import Permanent
from atoll.sdk.endpoint import read_token, running, start, state_dir

from .conftest import PATIENCE_S, stop, told, until


def test_the_first_call_starts_it_and_later_ones_find_it(where: Path) -> None:
    assert not where.exists()
    atoll.Client()  # making a client starts nothing
    assert not where.exists()
    with atoll.Client() as client:
        client.deploy_distributed("a", command=["true"]).result(PATIENCE_S)
    first = told(where)
    code = "import atoll; print([t.phase for t in atoll.Client().list()])"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (other.stdout.strip(), other.stderr) == ("['succeeded']", "")
    assert told(where) == first


def test_only_the_user_can_use_it(where: Path) -> None:
    with atoll.Client() as client:
        client.list()
    assert stat.S_IMODE(where.stat().st_mode) == 0o700
    for name in ("token", "endpoint.json", "socket"):
        assert stat.S_IMODE((where / name).stat().st_mode) == 0o600
    url = str(told(where)["url"])
    assert url.startswith("http://127.0.0.1:")
    assert httpx2.get(f"{url}/v1/trainings").status_code == 401
    token = read_token(where)
    for file in where.rglob("*"):
        if file.is_file() and file.name != "token":
            assert token.encode() not in file.read_bytes()


def test_what_it_is_found_by_is_made_again_when_somebody_deletes_it(where: Path) -> None:
    serve = "from atoll import main; main.WATCH_FILES_S = 0.05; main.serve(port=0)"
    with subprocess.Popen([sys.executable, "-c", serve], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline()
            before = told(where)
            for name in ("socket", "endpoint.json"):
                (where / name).unlink()
                until((where / name).exists)
                with atoll.Client() as client:
                    assert client.list() == []
                assert stat.S_IMODE((where / name).stat().st_mode) == 0o600
                assert told(where) == before
        finally:
            process.terminate()
    assert process.returncode == 0
    assert not (where / "socket").exists()


@needs_root
def test_another_user_who_reaches_the_socket_is_not_listened_to(where: Path) -> None:
    with atoll.Client() as client:
        client.list()
    where.chmod(0o711)  # as if its mode had been changed
    (where / "socket").chmod(0o666)
    request = (
        f"GET /v1/trainings HTTP/1.1\\r\\nHost: a\\r\\nAuthorization: Bearer {read_token(where)}"
    )
    code = textwrap.dedent(f"""
        import os, socket, sys
        uid = int(sys.argv[1])
        directory = os.open({str(where)!r}, os.O_PATH)
        os.setresuid(uid, uid, uid)
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(f"/proc/self/fd/{{directory}}/socket")
        try:
            connection.sendall(b"{request}\\r\\n\\r\\n")
            print(connection.recv(12).decode())
        except ConnectionError:
            print("")
    """)
    for uid, answer in ((0, "HTTP/1.1 200"), (65534, "")):
        done = subprocess.run([sys.executable, "-c", code, str(uid)], stdout=-1, text=True)
        assert done.stdout.strip() == answer


def test_ten_programs_at_once_start_one(where: Path) -> None:
    code = textwrap.dedent("""
        import atoll, sys
        client = atoll.Client()
        client.deploy_distributed("t-" + sys.argv[1], command=["true"]).result(60)
        print(client.endpoint.address().url)
    """)
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(number)], stdout=subprocess.PIPE, text=True
        )
        for number in range(10)
    ]
    urls = [program.communicate(timeout=100)[0].strip() for program in programs]
    assert [program.returncode for program in programs] == [0] * 10
    assert len(set(urls)) == 1
    with atoll.Client() as client:
        assert len(client.list(phase="succeeded")) == 10


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_one_that_is_gone_is_replaced_and_its_ranks_were_not_disturbed(
    where: Path, how: signal.Signals, tmp_path: Path
) -> None:
    with atoll.Client() as client:
        script = f"echo started; while [ ! -e {tmp_path / 'go'} ]; do sleep 0.05; done; echo done"
        t = client.deploy_distributed("a", command=["sh", "-c", script], world_size=2)
        t.wait_until_target_world(PATIENCE_S)
        before = told(where)
        stop(where, how)
        (tmp_path / "go").touch()
        # The same client finds the new one by itself.
        assert t.wait_until_complete(PATIENCE_S).ready == 2
        assert told(where)["pid"] != before["pid"]
        texts = sorted(line.text for line in t.logs())
        assert texts == ["done", "done", "started", "started"]
        assert [(e.rank, e.exit_code, e.restart_count) for e in t.rank_exits] == [
            (0, 0, 0),
            (1, 0, 0),
        ]


def test_a_wait_on_an_event_loop_replaces_one_that_is_gone(where: Path, tmp_path: Path) -> None:
    script = f"while [ ! -e {tmp_path / 'go'} ]; do sleep 0.05; done"

    async def waited() -> int:
        async with atoll.Client() as client:
            t = await client.deploy_distributed_async("a", command=["sh", "-c", script])
            await t.wait_until_target_world_async(PATIENCE_S)
            wait = asyncio.create_task(t.wait_until_complete_async(PATIENCE_S))
            await asyncio.to_thread(stop, where, signal.SIGKILL)
            await asyncio.to_thread(until, lambda: running(where) is not None)
            (tmp_path / "go").touch()
            return (await wait).ready

    assert asyncio.run(waited()) == 1


def test_shutdown_is_prompt_with_open_watches_and_follows(where: Path, tmp_path: Path) -> None:
    with atoll.Client() as client:
        t = client.deploy_distributed("a", command=["sleep", "600"], wait="min")
        address = client.endpoint.address()
        http = httpx2.Client(
            base_url=address.url, headers={"Authorization": f"Bearer {address.token}"}, timeout=60
        )
        paths = (f"/v1/trainings/{t.name}?watch", f"/v1/trainings/{t.name}/logs?follow=true")
        with http, http.stream("GET", paths[0]) as watch, http.stream("GET", paths[1]) as follow:
            chunks = watch.iter_raw()
            next(chunks)
            os.kill(int(str(told(where)["pid"])), signal.SIGTERM)
            for stream in (chunks, follow.iter_raw()):
                list(stream)  # ends, and not by a broken connection
        until(lambda: not running(where))
        assert "Traceback" not in (where / "server.log").read_text()
        assert t.phase == "ready"


def test_ranks_do_not_get_the_devices_of_the_shell_that_started_it(
    where: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = {
        "CUDA_VISIBLE_DEVICES": "7",
        "OMP_NUM_THREADS": "3",
        "VIRTUAL_ENV": "/first",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    with atoll.Client() as client:
        with monkeypatch.context() as shell:
            for name, value in first.items():
                shell.setenv(name, value)
            client.list()
            told(where)
        for name in first:
            monkeypatch.delenv(name, raising=False)
        t = client.deploy_distributed("a", command=["env"])
        t.result(PATIENCE_S)
        found = [line.text for line in t.logs()]
    assert "RANK=0" in found
    assert not [line for line in found if line.partition("=")[0] in first]


def test_a_lying_endpoint_file_is_not_believed(where: Path) -> None:
    where.mkdir(mode=0o700)
    for text in (
        "",
        "rubbish",
        "[]",
        '{"url": "http://127.0.0.1:1"}',
        json.dumps({"url": "http://127.0.0.1:1", "pid": os.getpid(), "startTime": "1"}),
        json.dumps({"url": "http://127.0.0.1:1", "pid": 2**30, "startTime": "1"}),
    ):
        (where / "endpoint.json").write_text(text)
        assert running(where) is None
    with atoll.Client() as client:
        assert client.list() == []


def test_two_control_planes_never_share_a_state_directory(where: Path) -> None:
    with atoll.Client() as client:
        client.list()
    with pytest.raises(Permanent, match="only one control plane per state directory"):
        start(where)
    with atoll.Client() as client:
        assert client.list() == []


def test_a_state_directory_that_cannot_be_made_is_said_plainly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ATOLL_STATE_DIR", str(tmp_path / "file" / "state"))
    monkeypatch.delenv("ATOLL_URL", raising=False)
    with atoll.Client() as client, pytest.raises(Permanent, match="set ATOLL_STATE_DIR"):
        client.list()


def test_where_state_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ATOLL_STATE_DIR", "/a/b")
    assert state_dir() == Path("/a/b")
    monkeypatch.delenv("ATOLL_STATE_DIR")
    monkeypatch.setenv("XDG_STATE_HOME", "/x")
    assert state_dir() == Path("/x/atoll")
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert state_dir() == tmp_path / ".local/state/atoll"


def test_the_environment_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_URL", "https://example.org:1/")
    monkeypatch.setenv("ATOLL_TOKEN", "secret")
    assert atoll.Client().endpoint.address()[:2] == ("https://example.org:1", "secret")
    assert atoll.Client("https://other:2", "t").endpoint.address()[:2] == ("https://other:2", "t")


@pytest.mark.parametrize("url", ["example.org", "ftp://x", "http://", "unix:///x"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(atoll.ValidationError) as caught:
        atoll.Client(url)
    assert caught.value.field == "url"


def test_ranks_find_the_programs_of_their_caller(
    where: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with atoll.Client() as client:
        client.list()  # started before PATH changed
        tools = tmp_path / "tools"
        tools.mkdir()
        (tools / "my-tool").write_text("#!/bin/sh\necho found in $PWD\n")
        (tools / "my-tool").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
        monkeypatch.chdir(tmp_path)
        t = client.deploy_distributed("path", command=["my-tool"])
        t.result(PATIENCE_S)
        assert [line.text for line in t.logs()] == [f"found in {tmp_path}"]
