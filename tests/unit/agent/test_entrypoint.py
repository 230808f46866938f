"""Shipped code in a rank: it sees what it would see if it were run by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest


def run(words: list[Any], cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "atoll.agent.entrypoint", *map(str, words)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, **env},
        timeout=60,
    )


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def test_a_script_sees_its_arguments_its_name_and_its_own_modules(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "beside.py").write_text("value = 42")
    payload = script(
        tmp_path / "shipped" / "train.py",
        "import sys, pickle, beside\n"
        "class Own: pass\n"
        "pickle.dumps(Own())\n"
        "print(__name__, sys.argv[1:], beside.value, sys.path[0], __file__)\n",
    )
    done = run(["--from", tmp_path / "home", "script", payload, "--lr", "0.1"], tmp_path)
    assert done.stderr == ""
    expected = f"__main__ ['--lr', '0.1'] 42 {tmp_path / 'home'} {payload}\n"
    assert (done.stdout, done.returncode) == (expected, 0)


def test_without_its_own_directory_modules_come_from_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "here.py").write_text("value = 1")
    payload = script(tmp_path / "s" / "a.py", "import here; print(here.value)")
    done = run(["--from", "/no/such/place", "script", payload], tmp_path)
    assert (done.stdout, done.returncode) == ("1\n", 0)


def test_a_failing_script_is_named_in_its_traceback_and_its_error_file(tmp_path: Path) -> None:
    payload = script(tmp_path / "s" / "train.py", "x = 1\nraise ValueError('bad loss')\n")
    errors = tmp_path / "errors" / "0.json"
    done = run(["script", payload], tmp_path, TORCHELASTIC_ERROR_FILE=str(errors))
    assert done.returncode == 1
    assert f'File "{payload}", line 2' in done.stderr
    assert done.stderr.rstrip().endswith("ValueError: bad loss")
    assert "entrypoint" not in done.stderr
    said = json.loads(errors.read_text())["message"]
    assert said["message"] == "ValueError: bad loss"
    assert float(said["extraInfo"]["timestamp"]) > 1.6e9


@pytest.mark.parametrize(
    ("code", "expected"), [("7", 7), ("None", 0), ("'said'", 1), ("0", 0), ("True", 1)]
)
def test_sys_exit_is_honoured(tmp_path: Path, code: str, expected: int) -> None:
    payload = script(tmp_path / "s" / "a.py", f"import sys; sys.exit({code})")
    errors = tmp_path / "error.json"
    done = run(["script", payload], tmp_path, TORCHELASTIC_ERROR_FILE=str(errors))
    assert done.returncode == expected
    assert not errors.exists()


def test_an_error_file_that_the_code_wrote_itself_is_kept(tmp_path: Path) -> None:
    errors = tmp_path / "error.json"
    payload = script(
        tmp_path / "s" / "a.py",
        "import os; open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write('mine')\nraise OSError",
    )
    run(["script", payload], tmp_path, TORCHELASTIC_ERROR_FILE=str(errors))
    assert errors.read_text() == "mine"


def test_a_script_that_does_not_parse_says_where(tmp_path: Path) -> None:
    payload = script(tmp_path / "s" / "a.py", "def f(:\n")
    done = run(["script", payload], tmp_path)
    assert done.returncode == 1
    assert f'File "{payload}", line 1' in done.stderr


def test_a_function_is_called_with_its_arguments(tmp_path: Path) -> None:
    offset = 5

    def train(a: str, b: str) -> None:
        print(int(a) + int(b) + offset)  # noqa: T201

    payload = tmp_path / "function.pkl"
    payload.write_bytes(cloudpickle.dumps(train))
    done = run(["function", payload, "1", "2"], tmp_path)
    assert (done.stdout, done.stderr, done.returncode) == ("8\n", "", 0)


def test_a_failing_function_exits_1_with_a_traceback(tmp_path: Path) -> None:
    def train() -> None:
        raise RuntimeError("no data")

    payload = tmp_path / "function.pkl"
    payload.write_bytes(cloudpickle.dumps(train))
    errors = tmp_path / "error.json"
    done = run(["function", payload], tmp_path, TORCHELASTIC_ERROR_FILE=str(errors))
    assert done.returncode == 1
    assert "RuntimeError: no data" in done.stderr
    assert "no data" in json.loads(errors.read_text())["message"]["message"]


@pytest.mark.parametrize("words", [[], ["script"], ["program", "x"]])
def test_wrong_words_are_a_usage_error(tmp_path: Path, words: list[str]) -> None:
    assert run(words, tmp_path).returncode == 2


@pytest.mark.parametrize("is_written", [True, False])
def test_what_torch_wrote_of_a_failed_replica_is_kept(tmp_path: Path, is_written: bool) -> None:
    file = tmp_path / "error.json"
    own = {"message": {"message": "torch's own", "extraInfo": {"timestamp": "1"}}}
    code = f"""
import json, pickle, pathlib, sys
from atoll.agent.entrypoint import ReplicaCall, main
path = pathlib.Path({str(file)!r})
if {is_written}:
    path.write_text(json.dumps({own!r}))
call = pathlib.Path({str(tmp_path / "call.pkl")!r})
call.write_bytes(pickle.dumps(ReplicaCall("math:nonesuch", {{}}, [])))
sys.exit(main(["function", str(call)]))
"""
    env = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(file)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, timeout=60)
    assert done.returncode == 1
    told = json.loads(file.read_text())["message"]["message"]
    assert told == "torch's own" if is_written else told.startswith("MissingCode: math:nonesuch: ")
