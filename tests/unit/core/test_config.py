"""`atoll.toml`: what it may say, and every refusal with the file, the field and what is right."""

from __future__ import annotations

import pytest

from atoll.backends.kubernetes.options import ClusterOptions
from atoll.backends.local.options import LocalOptions
from atoll.core.config import ExecutorConfig, options_of, parse
from atoll.core.errors import Permanent, ValidationError
from atoll.core.executors import KINDS, load

LOCAL = ExecutorConfig(kind="local")


def test_an_empty_file_has_this_machine() -> None:
    assert parse("", "a.toml").executors == {"local": LOCAL}


def test_executors_with_their_options() -> None:
    text = """
    [executors.local]
    slots = 4
    [executors.eu]
    kind = "kubernetes"
    context = "lab"
    [defaults]
    executor = "eu"
    """
    config = parse(text, "a.toml")
    assert config.executors == {
        "local": ExecutorConfig(kind="local", options={"slots": 4}),
        "eu": ExecutorConfig(kind="kubernetes", options={"context": "lab"}),
    }
    assert config.defaults == {"executor": "eu"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[executors", "a.toml: '[executors' is not valid: expected TOML"),
        ("[executor.eu]", "a.toml: executor: {'eu': {}} is not valid: there is no such field: did"),
        ("executors = 3", "a.toml: executors: 3 is not valid: expected a table: [executors]"),
        ("[executors]\neu = 'x'", "a.toml: executors.eu: 'x' is not valid: expected a table"),
        ("[executors.eu]", "a.toml: executors.eu.kind: None is not valid: expected one of local,"),
        ("[executors.eu]\nkind = 'k8s'", "a.toml: executors.eu.kind: 'k8s' is not valid: expected"),
        ("[executors.Eu]\nkind = 'kubernetes'", "a.toml: executors.Eu: 'Eu' is not valid"),
        ("[executors.eu]\nkind = 'local'", "executors.eu.kind: 'local' is not valid: expected ano"),
        ("[executors.local]\nkind = 'kubernetes'", "executors.local.kind: 'kubernetes' is not"),
    ],
)
def test_a_refusal_names_the_file_and_the_field(text: str, words: str) -> None:
    with pytest.raises(ValidationError) as refused:
        parse(text, "a.toml")
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"slots": 0}, "slots: 0 is not valid: expected a whole number from 1"),
        ({"slots": "4"}, "slots: '4' is not valid: expected `int | null`"),
        ({"slot": 4}, "slot: 4 is not valid: there is no such field: did you mean 'slots'?"),
    ],
)
def test_options_of_this_machine_are_checked(table: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError) as refused:
        options_of(LocalOptions, table)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"image_timeout_s": "x"}, "image_timeout_s: 'x' is not valid"),
        ({"node_selector": {"a": 1}}, "node_selector"),
        ({"lost_node_s": -1}, "lost_node_s: -1 is not valid"),
        ({"imageTimeoutS": 3}, "did you mean 'image_timeout_s'?"),
    ],
)
def test_options_of_a_cluster_are_checked(table: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError) as refused:
        options_of(ClusterOptions, table)
    assert words in str(refused.value)


def test_a_control_plane_keeps_jobs_and_holds_no_pod() -> None:
    table = options_of(ClusterOptions, {})
    assert (table.is_controlled, table.has_exit_finalizer) == (True, False)
    assert table.ttl_seconds_after_finished is None


def test_each_kind_is_loaded_by_its_name() -> None:
    assert [load(kind).name for kind in KINDS] == list(KINDS)


def test_an_unknown_kind_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValidationError, match="'lsf' is not valid: expected one of local, kube"):
        load("lsf")


def test_a_kind_without_its_packages_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError("No module named 'lightkube'", name="lightkube.config")

    monkeypatch.setattr("importlib.import_module", missing)
    with pytest.raises(Permanent) as refused:
        load("kubernetes")
    assert "pip install '.[kubernetes]' in a clone" in str(refused.value)
    assert "pip install '.[kubernetes]' in a clone" in str(refused.value)


def test_a_file_is_parsed_once_however_often_a_command_asks_for_it() -> None:
    text = "[executors.lab]\nkind = 'slurm'\n"
    assert parse(text, "atoll.toml") is parse(text, "atoll.toml")
    assert parse(text + "account = 'x'\n", "atoll.toml") != parse(text, "atoll.toml"), "changed"
