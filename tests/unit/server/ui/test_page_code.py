"""The same from code is the same: what the page shows, pasted, makes an equal spec."""

from __future__ import annotations

import os
import shlex
from typing import Any

import click
import pytest
from click.testing import CliRunner
from msgspec.structs import replace

import atoll
from atoll.cli.run import SPEC_OPTIONS, read_launch, run_parameters
from atoll.core.spec import (
    BenchSpec,
    Code,
    ProviderFilter,
    RendezvousSpec,
    Resources,
    Source,
    TrainingSpec,
    WorldSize,
)
from atoll.sdk.options import spec_of
from atoll.server.ui.page import FLAGS, python_of, shell_of

BASE = TrainingSpec(
    name="t", world_size=WorldSize(min=2, target=3, max=5), command=["python", "it's.py"]
)
CHANGES: dict[str, Any] = {
    "world_size": WorldSize(min=1, target=1, max=8),
    "command": ["sh", "-c", "echo 'a b' \"$X\";\n\texit 1", "--", "-n", ""],
    "args": ["--lr", "0.1", "two words"],
    "image": "registry/train:1",
    "env": {"WORDS_KEY": "secret value"},
    "working_dir": "/some/where else",
    "resources": Resources(cpu="500m", memory="4Gi", gpu_count=2),
    "provider_filter": ProviderFilter(include=["a"], exclude=["b"]),
    "topology_spread": "pack",
    "nccl_env": {"NCCL_DEBUG": "INFO"},
    "bench": BenchSpec(mode="on-start", placement="strict", require_gbps=2.5),
    "rendezvous": RendezvousSpec(backend="none", uri="s3://bucket/run"),
    "run_id": "run-1",
    "mesh": True,
    "pip_packages": ["numpy==2", "torch"],
    "max_restarts": 3,
    "start_grace_s": 1.5,
    "stop_grace_s": 2.5,
    "deadline_s": 3600.5,
    "ttl_seconds": 60,
    "stall_s": 30.0,
    "stall_restart": True,
    "executor": "elsewhere",
    "labels": {"team": "a b=c"},
    "settings": {"lr": 0.1, "width": 64, "name": "adam w", "is_fast": True},
}
# What an option cannot say: the name is another one, and code is of the caller's directory.
APART = {"name", "display_name", "source", "code", "cancel"}
PYTHON_ONLY = {"provider_filter", "topology_spread", "nccl_env"}


def test_every_field_of_a_spec_is_tried() -> None:
    assert {*CHANGES, *APART} == {*TrainingSpec.__struct_fields__}
    rows = [row for heading in SPEC_OPTIONS.values() for row in heading]
    assert {row.option: row.flags[0] for row in rows}.items() <= FLAGS.items()


def changed(*fields: str) -> TrainingSpec:
    extra = {"stall_restart": ("stall_s", "max_restarts")}
    names = {*fields, *(more for field in fields for more in extra.get(field, ()))}
    return replace(BASE, **{name: CHANGES[name] for name in names})


class Recorder:
    """In the place of a client."""

    def deploy_distributed(self, name: str, **options: Any) -> TrainingSpec:
        return spec_of(name, options)  # type: ignore[arg-type]


def pasted_python(text: str) -> TrainingSpec:
    names: dict[str, Any] = {}
    code = text.replace("import atoll\n", "").replace("atoll.Client()", "client")
    exec(code, {"atoll": atoll, "client": Recorder(), "os": os}, names)
    made: TrainingSpec = names["training"]
    return made


def pasted_shell(text: str, monkeypatch: pytest.MonkeyPatch) -> TrainingSpec:
    made: list[TrainingSpec] = []

    @click.command(params=run_parameters(), context_settings={"allow_interspersed_args": False})
    def run(command: tuple[str, ...], **values: Any) -> None:
        for name in ("is_detached", "timeout", "is_removed", "is_dry", "is_json"):
            del values[name]
        launch = read_launch(command, **values)
        options = {name: value for name, value in launch.options.items() if name != "code"}
        made.append(spec_of(launch.name, options))  # type: ignore[arg-type]

    atoll_word, run_word, *words = shlex.split(text)
    assert (atoll_word, run_word) == ("atoll", "run")
    monkeypatch.setattr("sys.argv", ["atoll", "run", *words])
    done = CliRunner().invoke(run, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return made[0]


@pytest.fixture(autouse=True)
def _variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("env", "nccl_env"):
        for variable, value in CHANGES[name].items():
            monkeypatch.setenv(variable, value)


@pytest.mark.parametrize("fields", [(), *((name,) for name in CHANGES), tuple(CHANGES)])
def test_python_that_is_pasted_makes_the_same_training(fields: tuple[str, ...]) -> None:
    spec = changed(*fields)
    text = python_of(spec, "again")
    assert "secret" not in text
    assert pasted_python(text) == replace(spec, name="again")


@pytest.mark.parametrize(
    "fields",
    [
        (),
        *((name,) for name in CHANGES),
        tuple(name for name in CHANGES if name not in PYTHON_ONLY),
    ],
)
def test_a_command_that_is_pasted_makes_the_same_training(
    fields: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = changed(*fields)
    text = shell_of(spec, "again")
    assert "secret" not in text
    if {*fields} & PYTHON_ONLY:
        assert text == ""  # better none than another training
        return
    whole = [*(spec.command or ()), *spec.args]
    assert pasted_shell(text, monkeypatch) == replace(spec, name="again", command=whole, args=[])


def test_a_name_that_is_no_dns_label_is_pasted_as_it_was_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    named = replace(BASE, name="train-lr0.1")
    assert named.name == "train-lr0-1"
    for text in (python_of(named, "train-lr0.1-2"), shell_of(named, "train-lr0.1-2")):
        assert "train-lr0.1-2" in text
        assert "display_name" not in text
    again = pasted_shell(shell_of(named, "train-lr0.1-2"), monkeypatch)
    assert (again.name, again.display_name) == ("train-lr0-1-2", "train-lr0.1-2")


def test_what_cannot_be_pasted_is_not_shown() -> None:
    shipped = replace(BASE, command=None, source=Source(kind="script", content=b"pass"))
    assert (shell_of(shipped, "a"), python_of(shipped, "a")) == ("", "")
    assert shell_of(replace(BASE, command=["echo", "\x1b]0;title\x07"]), "a") == ""
    assert "\x1b" not in python_of(replace(BASE, command=["echo", "\x1b]0;title\x07"]), "a")


def test_code_that_travelled_travels_again_and_none_does_not() -> None:
    code = Code(content=b"x", size=1, unpacked=1, files=1)
    for sent, is_said in ((code, False), (None, True)):
        spec = replace(BASE, executor="elsewhere", code=sent)
        assert ("--no-code" in shell_of(spec, "a")) == is_said
        assert ("code=False" in python_of(spec, "a")) == is_said


def test_kinds_of_gpus_are_said_in_python() -> None:
    kinds = Resources(gpu_count=1, gpu_models=["H100"], min_gpu_memory_gb=80)
    spec = replace(BASE, resources=kinds)
    assert pasted_python(python_of(spec, "t")) == spec
    assert shell_of(spec, "t") == ""
