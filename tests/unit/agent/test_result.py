"""Results of ranks: what comes back, what is refused, and what a crash leaves."""

from __future__ import annotations

import errno
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy
import pytest

from atoll.agent.process import result_fields
from atoll.agent.result import (
    MAX_BYTES,
    Result,
    encode_value,
    set_result,
    set_return_value,
    write_result,
)
from atoll.code.results import decode_value, parse_result
from atoll.core.errors import ResultError
from atoll.server.handlers.trainings import report_of


def carried(result: Result, folder: Path) -> Result:
    """The result as somebody reads it that a rank has left in a file."""
    path = folder / "0.0.result"
    write_result(str(path), result)
    return parse_result(path.read_bytes())


@pytest.mark.parametrize(
    ("value", "encoding"),
    [
        (None, "json"),
        ({"loss": 0.5, "names": ["a", "\u00e9", None, True], "n": 2**80}, "json"),
        (float("inf"), "msgpack"),
        ((3, 1), "msgpack"),
        ({"tag": b"\0\xff", "nested": [(1, {2, 3}), frozenset({"x"})]}, "msgpack"),
        ({1: "one", (2, 3): "pair"}, "msgpack"),
        ([2j, b"", 2**80], "msgpack"),
    ],
)
def test_plain_data_comes_back_as_it_was(value: Any, encoding: str, tmp_path: Path) -> None:
    result = encode_value(value)
    assert result.encoding == encoding
    decoded = decode_value(carried(result, tmp_path))
    assert decoded == value
    assert type(decoded) is type(value)


def test_arrays_come_back_with_their_shape_and_type() -> None:
    value = {"w": numpy.arange(6, dtype="float32").reshape(2, 3), "loss": numpy.float64(0.25)}
    decoded = decode_value(encode_value(value))
    assert decoded["w"].dtype == numpy.float32
    assert (decoded["w"] == value["w"]).all()
    assert type(decoded["loss"]) is numpy.float64


def test_tensors_come_back_as_tensors() -> None:
    torch = pytest.importorskip("torch")
    base = torch.arange(6, dtype=torch.float32, requires_grad=True).reshape(2, 3)
    values = {
        "loss": base.sum(),
        "turned": base.t(),
        "half": base.to(torch.bfloat16),
        "weight": torch.nn.Parameter(torch.ones(2)),
        "mask": base > 2,
        "none": torch.empty(0, 3),
        "conjugate": torch.tensor([1 + 2j]).conj(),
    }
    decoded = decode_value(encode_value(values))
    for name, value in values.items():
        assert type(decoded[name]) is torch.Tensor
        assert decoded[name].dtype == value.dtype
        assert torch.equal(decoded[name], value.detach())


def test_what_is_no_type_of_tensors_is_not_looked_up() -> None:
    pytest.importorskip("torch")
    payload = msgspec.msgpack.encode(
        msgspec.msgpack.Ext(9, msgspec.msgpack.encode(["load", [1], b"a"]))
    )
    with pytest.raises(ValueError, match="a tensor of 'load'"):
        decode_value(Result("msgpack", payload))


@pytest.mark.parametrize("value", [object(), Path("x"), [numpy.array([object()])], lambda: None])
def test_what_is_not_plain_data_is_refused_by_its_type(value: Any) -> None:
    with pytest.raises(TypeError, match="expected plain data"):
        encode_value(value)


@pytest.mark.parametrize("value", ["\ud800", {"name-\udcff": 1}, ("\udcff",)])
def test_text_that_utf_8_cannot_hold_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="expected text that UTF-8 can hold") as refused:
        encode_value(value)
    assert str(refused.value).isascii()


def test_a_result_that_a_rank_has_forged_is_an_answer() -> None:
    report = report_of(0, "json", b'["\\ud800"]')
    assert report.encoding == "none"
    assert "not JSON in UTF-8" in str(report.error)
    assert report_of(0, "json", b'["\\u00e9"]').value == ["\u00e9"]


def test_what_holds_itself_is_refused() -> None:
    loop: list[Any] = [()]
    loop.append(loop)
    with pytest.raises(ValueError, match="holds itself"):
        encode_value(loop)


class Evil:
    def __init__(self, record_store: Path) -> None:
        self.record_store = record_store

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.record_store),)


@pytest.mark.parametrize("encoding", ["json", "msgpack", "pickle", "none"])
def test_reading_a_result_runs_no_code_of_the_rank(tmp_path: Path, encoding: str) -> None:
    payload = pickle.dumps(Evil(tmp_path / "ran"))
    result = carried(Result(encoding, payload), tmp_path)
    with pytest.raises(ValueError, match="."):
        decode_value(result)
    assert not (tmp_path / "ran").exists()


def test_a_pickle_is_read_only_where_it_is_allowed() -> None:
    result = encode_value(Path("x"), pickled=True)
    with pytest.raises(ValueError, match="allow_pickle"):
        decode_value(result)
    assert decode_value(result, allow_pickle=True) == Path("x")


def test_a_rank_leaves_what_it_can_and_says_what_it_cannot(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "0.0.result"
    monkeypatch.delenv("ATOLL_RESULT", raising=False)
    set_result(1)  # atoll did not start this process
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("ATOLL_RESULT", str(path))
    set_result({"loss": 2})
    set_result({"loss": 1})
    assert parse_result(path.read_bytes()) == Result("json", b'{"loss": 1}')
    assert result_fields(str(path)) == {"result": {"encoding": "json", "bytes": 11}}
    set_return_value(object())
    said = capfd.readouterr()
    assert "not a builtins.object" in said.err
    assert said.out == ""  # the log is what the program prints
    with pytest.raises(ValueError, match=r"not a builtins\.object"):
        decode_value(parse_result(path.read_bytes()))
    with pytest.raises(ValueError, match="17 MiB, expected at most 16"):
        set_result("x" * 17 * 2**20)
    monkeypatch.setenv("ATOLL_RESULTS", "pickle")
    set_return_value(Path("x"))
    assert decode_value(parse_result(path.read_bytes()), allow_pickle=True) == Path("x")
    assert os.listdir(tmp_path) == ["0.0.result"]


def test_the_largest_result_fits(tmp_path: Path) -> None:
    result = Result("msgpack", bytes(MAX_BYTES))
    assert carried(result, tmp_path) == result


KILLED = """
import os, signal, atoll.agent.result as r
r.set_result("first")
r.os.fsync = lambda file: os.kill(os.getpid(), signal.SIGKILL)
r.set_result("second")
"""


def test_a_rank_killed_inside_set_result_leaves_the_result_before(tmp_path: Path) -> None:
    path = tmp_path / "0.0.result"
    env = {**os.environ, "ATOLL_RESULT": str(path)}
    done = subprocess.run([sys.executable, "-c", KILLED], env=env)
    assert done.returncode == -signal.SIGKILL
    assert decode_value(parse_result(path.read_bytes())) == "first"


def test_a_full_disk_is_an_error_and_the_result_before_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "0.0.result"
    monkeypatch.setenv("ATOLL_RESULT", str(path))
    set_result("first")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        set_result("second")
    set_return_value("third")  # a function that has ended well does not fail by that
    assert "No space left" in capfd.readouterr().err
    assert decode_value(parse_result(path.read_bytes())) == "first"
    assert os.listdir(tmp_path) == ["0.0.result"]


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]\n", b'{"encoding":"json","bytes":2}\n1'])
def test_what_is_no_result_is_damage(data: bytes) -> None:
    with pytest.raises(ResultError, match="damaged"):
        parse_result(data)
