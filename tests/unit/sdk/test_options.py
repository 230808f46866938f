"""DeployOptions to spec: what goes on the wire, and what is refused before anything is sent."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import cloudpickle
import msgspec
import pytest

import atoll
from atoll.core.errors import ValidationError
from atoll.core.model import encode
from atoll.core.spec import ProviderFilter, WorldSize
from atoll.sdk.effects import Pack
from atoll.sdk.options import DeployOptions, pack_of, spec_of, wait_of


def wire(**options: Any) -> dict[str, Any]:
    options.setdefault("command", ["python", "train.py"])
    found: dict[str, Any] = msgspec.json.decode(encode(spec_of("tiny-gpt", options)))  # type: ignore[arg-type]
    return found


def test_the_least_is_little() -> None:
    assert wire() == {
        "name": "tiny-gpt",
        "worldSize": {"min": 1, "target": 1, "max": 1},
        "command": ["python", "train.py"],
    }


def test_every_option_has_its_place() -> None:
    assert wire(
        args=("--lr", "0.1"),
        image="img",
        env={"A": "b"},
        working_dir="/data",
        cpu=2,
        memory="4Gi",
        gpu_count=1,
        gpu_models=("H100",),
        min_gpu_memory_gb=40,
        world_size=WorldSize(min=2, target=4, max=8),
        provider_filter=ProviderFilter(include=["x"], exclude=["y"]),
        topology_spread="pack",
        nccl_env={"NCCL_DEBUG": "INFO"},
        bench="on-start",
        bench_placement="strict",
        bench_require_gbps=10.0,
        rendezvous_backend="etcd-v2",
        rendezvous_uri="s3://b/run",
        run_id="exp-7",
        pip_packages=["einops"],
        max_restarts=3,
        start_grace_s=5,
        stop_grace_s=2,
        deadline_s=3600,
        ttl_seconds=60,
        executor="kubernetes",
        mesh=True,
        timeout=5,
        wait="min",
    ) == {
        "name": "tiny-gpt",
        "command": ["python", "train.py"],
        "args": ["--lr", "0.1"],
        "image": "img",
        "env": {"A": "b"},
        "workingDir": "/data",
        "resources": {
            "cpu": "2",
            "memory": "4Gi",
            "gpuCount": 1,
            "gpuModels": ["H100"],
            "minGpuMemoryGb": 40,
        },
        "worldSize": {"min": 2, "target": 4, "max": 8},
        "providerFilter": {"include": ["x"], "exclude": ["y"]},
        "topologySpread": "pack",
        "ncclEnv": {"NCCL_DEBUG": "INFO"},
        "bench": {"mode": "on-start", "placement": "strict", "requireGbps": 10.0},
        "rendezvous": {"backend": "etcd-v2", "uri": "s3://b/run"},
        "runId": "exp-7",
        "pipPackages": ["einops"],
        "maxRestarts": 3,
        "startGraceS": 5.0,
        "stopGraceS": 2.0,
        "deadlineS": 3600.0,
        "ttlSeconds": 60,
        "executor": "kubernetes",
        "mesh": True,
    }


def test_only_strict_placement_is_on_the_wire() -> None:
    assert wire(bench="on-start")["bench"] == {"mode": "on-start"}
    assert wire(bench="on-start", bench_placement="preferred")["bench"] == {"mode": "on-start"}
    strict = wire(bench="on-start", bench_placement="strict")["bench"]
    assert strict == {"mode": "on-start", "placement": "strict"}


@pytest.mark.parametrize("placement", ["strict", "preferred", "rubbish", 7])
def test_placement_is_ignored_while_bench_is_off(placement: Any) -> None:
    assert "bench" not in wire(bench="off", bench_placement=placement)
    assert "bench" not in wire(bench_placement=placement)


def test_placement_is_checked_while_bench_is_on() -> None:
    with pytest.raises(ValidationError) as caught:
        wire(bench="on-start", bench_placement="rubbish")
    assert (caught.value.field, caught.value.value) == ("bench_placement", "rubbish")


def test_none_is_unset() -> None:
    assert wire(image=None, source=None, bench=None, world_size=None, wait=None) == wire()


BAD: list[tuple[dict[str, Any], str]] = [
    ({"world_size": WorldSize}, "world_size"),
    ({"world_size": 0}, "world_size.min"),
    ({"world_size": -1}, "world_size.min"),
    ({"world_size": 10**12}, "world_size.min"),
    ({"world_size": True}, "world_size"),
    ({"command": "python train.py"}, "command"),
    ({"command": []}, "command"),
    ({"command": [""]}, "command"),
    ({"command": ["a\0b"]}, "command[0]"),
    ({"command": ["x"], "source": "train.py"}, "source"),
    ({"command": None}, "command"),
    ({"args": [1]}, "args[0]"),
    ({"env": {"RANK": "1"}}, "env.RANK"),
    ({"env": {"A": 1}}, "env.A"),
    ({"env": {"A B": "1"}}, "env"),
    ({"cpu": "lots"}, "cpu"),
    ({"cpu": True}, "cpu"),
    ({"memory": -1}, "memory"),
    ({"gpu_count": -1}, "gpu_count"),
    ({"gpu_count": 1.5}, "gpu_count"),
    ({"max_restarts": -1}, "max_restarts"),
    ({"ttl_seconds": -1}, "ttl_seconds"),
    ({"bench": "maybe"}, "bench"),
    ({"topology_spread": "wide"}, "topology_spread"),
    ({"rendezvous_backend": "etcd"}, "rendezvous_backend"),
    ({"rendezvous_uri": "ftp://x"}, "rendezvous_uri"),
    ({"run_id": "a b"}, "run_id"),
    ({"provider_filter": {"include": ["a"]}}, "provider_filter"),
    ({"mesh": "yes"}, "mesh"),
    ({"executor": "../x"}, "executor"),
    ({"stop_grace_s": float("nan")}, "stop_grace_s"),
    ({"deadline_s": 0}, "deadline_s"),
    ({"wait": "all"}, "wait"),
    ({"wait": "min", "timeout": -1}, "timeout"),
    ({"wait": "min", "timeout": float("nan")}, "timeout"),
    ({"source": "no-such-file.py", "command": None}, "source"),
    ({"source": 7, "command": None}, "source"),
]


@pytest.mark.parametrize(("options", "field"), BAD, ids=lambda value: str(value)[:40])
def test_bad_options_are_refused_before_anything_is_sent(
    options: dict[str, Any], field: str
) -> None:
    client = atoll.Client("http://127.0.0.1:1", "token")  # nobody listens there
    with pytest.raises(ValidationError) as caught:
        client.deploy_distributed("tiny-gpt", **{"command": ["x"], **options})  # type: ignore[typeddict-item]
    assert caught.value.field == field
    assert field in str(caught.value)


def test_a_misspelt_option_is_told_the_right_one() -> None:
    with pytest.raises(ValidationError, match="did you mean 'max_restarts'"):
        wire(max_restart=3)


@pytest.mark.parametrize("name", ["a/b", "..", "", "a" * 201, "-a", "ä", "a\n", " a", None, 7])
def test_bad_names_are_refused_everywhere(name: Any) -> None:
    client = atoll.Client("http://127.0.0.1:1", "token")
    for call in (lambda: client.get(name), lambda: client.deploy_distributed(name, command=["x"])):
        with pytest.raises(ValidationError) as caught:
            call()
        assert caught.value.field == "name"


def test_every_option_is_known_to_the_spec_or_the_wait() -> None:
    assert wait_of({}) == (None, 600.0)
    assert "wait" in DeployOptions.__annotations__


def test_a_script_travels_with_its_name_and_place(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print(1)")
    source = spec_of("a", {"source": script}).source
    assert source is not None
    assert (source.kind, source.filename, source.content) == ("script", "train.py", b"print(1)")
    assert source.directory == str(tmp_path)


def helper(x: int) -> int:
    return x + 1


def uses_helper(x: int) -> int:
    return helper(x) + len(BAD)


def test_a_function_travels_with_the_helpers_of_its_module() -> None:
    source = spec_of("a", {"source": uses_helper}).source
    assert source is not None
    again = cloudpickle.loads(source.content)
    assert again is not uses_helper
    assert again.__globals__ is not uses_helper.__globals__
    assert again(1) == uses_helper(1)


def test_closures_and_partials_travel() -> None:
    big = b"x" * 10**6

    def inner(a: int) -> int:
        return a + len(big)

    for function in (inner, functools.partial(inner, 5)):
        source = spec_of("a", {"source": function}).source
        assert source is not None
        assert len(source.content) > 10**6


def test_what_cannot_be_shipped_is_refused_by_name(tmp_path: Path) -> None:
    file = (tmp_path / "x").open("w")

    def holds_a_file() -> None:
        file.write("")

    async def is_async() -> None: ...

    def is_lazy() -> Any:
        yield

    async def is_both() -> Any:
        yield

    for function in (holds_a_file, is_async, is_lazy, is_both, functools.partial(is_lazy)):
        with pytest.raises(ValidationError) as caught:
            spec_of("a", {"source": function})
        assert caught.value.field == "source"
    file.close()


def test_code_that_is_too_large_is_refused_before_it_is_sent() -> None:
    big = b"x" * (45 * 2**20)
    with pytest.raises(ValidationError, match="44 MiB"):
        spec_of("a", {"source": lambda: big})


def pack(**options: Any) -> Pack | None:
    options.setdefault("command", ["python", "train.py"])
    return pack_of(spec_of("a", options), options)  # type: ignore[arg-type]


def test_the_working_directory_travels_unless_it_is_said_not_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    monkeypatch.chdir(project)
    monkeypatch.setenv("PYTHONPATH", f"src:{tmp_path}/lib:")
    assert pack() == Pack(str(project), (f"{project}/src", f"{tmp_path}/lib"))
    assert pack(executor="lab") == pack()
    assert pack(executor="local") is None
    assert pack(code=False) is None
    assert pack(working_dir=tmp_path) == Pack(str(tmp_path), pack().path)  # type: ignore[union-attr]
    assert pack(working_dir="/of/the/image") is None
    with pytest.raises(ValidationError, match=r"code: 'yes'.*expected True, or False"):
        pack(code="yes")


def test_the_home_directory_is_not_sent_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert pack() is None
    assert caplog.text == ""  # ranks run here
    assert pack(executor="eu") is None
    assert "is your home directory" in caplog.text
    assert pack(working_dir=tmp_path) == Pack(str(tmp_path), pack(working_dir=tmp_path).path)  # type: ignore[union-attr]


def test_a_script_and_a_function_bring_the_folders_of_their_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools/train.py").write_text("import model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "src"))
    made = pack(command=None, source=tmp_path / "tools/train.py")
    assert made is not None
    assert made.path[:2] == (str(tmp_path / "tools"), str(tmp_path / "src"))
