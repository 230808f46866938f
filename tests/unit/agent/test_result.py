"""Results in a log: what comes back, and what is ignored."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import msgspec
import numpy
import pytest

from atoll.agent.result import (
    MARK,
    MAX_BYTES,
    Result,
    decode_value,
    encode_value,
    hand_in,
    nonce_of,
    parts_expected,
    read_result,
    result_lines,
    set_result,
)
from atoll.core.lines import without_result
from atoll.server.handlers.results import report_of

NONCE = nonce_of("a-launch")


def lines_of(result: Result, nonce: str = NONCE, call: str = "00000001") -> list[str]:
    return [line.decode().rstrip("\n") for line in result_lines(result, nonce, call)]


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
def test_plain_data_comes_back_as_it_was(value: Any, encoding: str) -> None:
    result = encode_value(value)
    assert result.encoding == encoding
    back = read_result(lines_of(result), NONCE).result
    assert back is not None
    decoded = decode_value(back)
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
    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.place),)


@pytest.mark.parametrize("encoding", ["json", "msgpack", "pickle", "none"])
def test_reading_a_result_runs_no_code_of_the_rank(tmp_path: Path, encoding: str) -> None:
    payload = pickle.dumps(Evil(tmp_path / "ran"))
    reading = read_result(lines_of(Result(encoding, payload)), NONCE)
    assert reading.result is not None
    with pytest.raises(ValueError, match="."):
        decode_value(reading.result)
    assert not (tmp_path / "ran").exists()


def test_a_pickle_is_read_only_where_it_is_allowed() -> None:
    result = encode_value(Path("x"), pickled=True)
    with pytest.raises(ValueError, match="allow_pickle"):
        decode_value(result)
    assert decode_value(result, allow_pickle=True) == Path("x")


@pytest.mark.parametrize(
    "rest",
    [
        "",
        "0 1 gASVBQAAAAAAAABLKi4=",
        f"{NONCE} 00000001 json 0 1 !!!",
        f"{NONCE} 00000001 json 0 1 A",
        f"{NONCE} 00000001 json 1 1 MQ==",
        f"{NONCE} 00000001 json 0 9999 MQ==",
        f"{NONCE} 00000001 yaml 0 1 MQ==",
        f"{NONCE} 00000001 json -1 1 MQ==",
        f"{NONCE} 00000001 json 0 1 MQ== more",
        f"{nonce_of('another')} 00000001 json 0 1 MQ==",
        "\u0660" * 40,
    ],
)
def test_a_bad_mark_is_ignored_and_told(rest: str) -> None:
    alone = read_result([f"before {MARK}{rest}"], NONCE)
    assert alone.result is None
    assert "1 marked line of its log ignored" in alone.trouble
    beside = read_result([*lines_of(encode_value(7)), MARK + rest], NONCE)
    assert beside.result == encode_value(7)
    assert beside.trouble == alone.trouble


def test_the_last_complete_result_counts_and_calls_do_not_mix() -> None:
    first, second = encode_value("a" * 9000), encode_value("b" * 9000)
    a, b = lines_of(first, call="0000000a"), lines_of(second, call="0000000b")
    assert len(a) == 4
    mixed = [line for pair in zip(a, b, strict=True) for line in pair]
    assert read_result(mixed, NONCE).result == second
    assert read_result([*b, *a[:2]], NONCE).result == second
    assert "not complete" in read_result(a[1:], NONCE).trouble
    assert parts_expected(a[-1:], NONCE) == 4
    assert parts_expected(["x", MARK], NONCE) == 0


def test_lines_fit_into_one_write_and_hide_nothing_else() -> None:
    lines = result_lines(Result("msgpack", bytes(MAX_BYTES)), NONCE, "00000001")
    assert max(map(len, lines)) <= 4096
    assert without_result("half" + lines[0].decode()) == "half"
    assert without_result(lines[1].decode()) is None
    assert without_result("plain") == "plain"


def test_a_rank_hands_in_what_it_can_and_says_what_it_cannot(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("ATOLL_UID", raising=False)
    set_result(1)
    assert capfd.readouterr().out == ""
    monkeypatch.setenv("ATOLL_UID", "a-launch")
    set_result({"loss": 1})
    reading = read_result(capfd.readouterr().out.split("\n"), NONCE)
    assert reading.result == Result("json", b'{"loss": 1}')
    hand_in(object())
    said = capfd.readouterr()
    assert "not a builtins.object" in said.err
    result = read_result(said.out.split("\n"), NONCE).result
    assert result is not None
    with pytest.raises(ValueError, match=r"not a builtins\.object"):
        decode_value(result)
    with pytest.raises(ValueError, match="17 MiB, expected at most 16"):
        set_result("x" * 17 * 2**20)
    monkeypatch.setenv("ATOLL_RESULTS", "pickle")
    hand_in(Path("x"))
    result = read_result(capfd.readouterr().out.split("\n"), NONCE).result
    assert result is not None
    assert decode_value(result, allow_pickle=True) == Path("x")
