"""The content of `atoll.toml`, checked: executors by name, defaults, webhooks. Pure."""

from __future__ import annotations

import difflib
import functools
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from atoll.core.checks import check_name
from atoll.core.errors import ValidationError
from atoll.core.executors import LOCAL, check_kind
from atoll.core.model import Model, convert, decode_error
from atoll.core.problem import rename_fields
from atoll.core.webhooks import WebhookConfig

T = TypeVar("T", bound=msgspec.Struct)

TABLES = ("executors", "defaults", "rounds", "webhooks")
OBJECT_STORES = ("s3://", "gs://", "az://")


class ExecutorConfig(Model, frozen=True):
    """One table `[executors.NAME]`. Its options are checked by the class of its kind."""

    kind: str
    options: dict[str, Any] = {}


class RoundStore(Model, frozen=True):
    """One `[[rounds.stores]]`: rounds of these namespaces are read from the manifests under `uri`,
    with the credentials of the control plane."""

    uri: str
    namespaces: list[str] = msgspec.field(default_factory=lambda: ["default"])


def _only_local() -> dict[str, ExecutorConfig]:
    return {LOCAL: ExecutorConfig(kind=LOCAL)}


class Config(Model, frozen=True):
    """One file. Without a file there is the local executor and nothing else."""

    path: str | None = None
    digest: str = ""  # of the file as it was read
    executors: dict[str, ExecutorConfig] = msgspec.field(default_factory=_only_local)
    defaults: dict[str, Any] = {}
    round_stores: list[RoundStore] = []
    webhooks: list[WebhookConfig] = []

    @property
    def is_for_plane(self) -> bool:
        """Whether there is something in it for the control plane, beside defaults of trainings."""
        return bool(self.round_stores or self.webhooks) or self.executors != _only_local()


@functools.lru_cache(maxsize=8)  # several parts of a command ask for the same file
def parse(text: str, path: str, digest: str = "") -> Config:
    """Raises ValidationError naming the file, the field, its value and what would be right."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        reason = f"expected TOML: {error}"
        raise ValidationError(path, _line_of(error, text), reason) from error
    try:
        _check_known("", tables, TABLES)
        executors = _only_local()
        for name, table in _table("executors", tables.get("executors", {})).items():
            executors[name] = _executor(name, _table(f"executors.{name}", table))
        defaults = _table("defaults", tables.get("defaults", {}))
        round_stores = _round_stores(_table("rounds", tables.get("rounds", {})))
        webhooks = _webhooks(tables.get("webhooks", []))
    except ValidationError as error:
        raise in_file(path, error) from error
    return Config(
        path=path,
        digest=digest,
        executors=executors,
        defaults=defaults,
        round_stores=round_stores,
        webhooks=webhooks,
    )


def _round_stores(table: dict[str, Any]) -> list[RoundStore]:
    _check_known("rounds", table, ["stores"])
    stores = []
    for field, store in _entries("rounds.stores", table.get("stores", []), RoundStore):
        if not store.uri.startswith(OBJECT_STORES):
            expected = f"expected one of {', '.join(OBJECT_STORES)}"
            raise ValidationError(f"{field}.uri", store.uri, expected)
        stores.append(store)
    return stores


def _webhooks(entries: object) -> list[WebhookConfig]:
    webhooks: list[WebhookConfig] = []
    if isinstance(entries, list) and any("secret" in _table("webhooks", e) for e in entries):
        expected = "expected the name of a file as secret_file, or of a variable as secret_env"
        raise ValidationError("webhooks.secret", "…", expected)
    for field, webhook in _entries("webhooks", entries, WebhookConfig):
        if webhook.url in (each.url for each in webhooks):
            raise ValidationError(f"{field}.url", webhook.url, "expected each URL once")
        webhooks.append(webhook)
    return webhooks


def _entries(name: str, entries: object, kind: type[T]) -> list[tuple[str, T]]:
    """The tables of a list, each with its place in the file."""
    if not isinstance(entries, list):
        raise ValidationError(name, entries, f"expected tables: [[{name}]]")
    read = []
    for at, entry in enumerate(entries):
        field = f"{name}[{at}]"
        try:
            read.append((field, options_of(kind, _table(field, entry))))
        except ValidationError as error:
            raise ValidationError(f"{field}.{error.field}", error.value, error.expected) from error
    return read


def in_file(path: str | None, error: ValidationError, table: str = "") -> ValidationError:
    """The same error with the file and the table in front of the field."""
    field = f"{table}.{error.field}" if table else error.field
    return ValidationError(f"{path}: {field}" if path else field, error.value, error.expected)


def _executor(name: str, table: dict[str, Any]) -> ExecutorConfig:
    check_name(f"executors.{name}", name)
    options = dict(table)
    kind = options.pop("kind", LOCAL if name == LOCAL else None)
    check_kind(f"executors.{name}.kind", kind)
    if (kind == LOCAL) != (name == LOCAL):
        expected = (
            "expected 'local': the executor of that name is this machine"
            if name == LOCAL
            else "expected another kind: this machine is the executor 'local'"
        )
        raise ValidationError(f"executors.{name}.kind", kind, expected)
    return ExecutorConfig(kind=kind, options=options)


def options_of(kind: type[T], table: Mapping[str, Any]) -> T:
    """A table as the options of an executor, by the names that they have in Python."""
    names = {field.name: field.encode_name for field in msgspec.structs.fields(kind)}
    _check_known("", table, names)
    try:
        return convert({names[name]: value for name, value in table.items()}, kind)
    except msgspec.ValidationError as error:
        refused = decode_error(error, kind, {names[name]: value for name, value in table.items()})
        raise rename_fields(refused, {wire: name for name, wire in names.items()}) from error


def _check_known(table: str, keys: Mapping[str, Any], known: Iterable[str]) -> None:
    for key, value in keys.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "expected " + ", ".join(known)
            field = f"{table}.{key}" if table else key
            raise ValidationError(field, value, f"there is no such field: {hint}")


def _table(field: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValidationError(field, value, f"expected a table: [{field}]")
    return value


def _line_of(error: tomllib.TOMLDecodeError, text: str) -> str:
    """The line that is not TOML: the error holds its number only as text."""
    number = str(error).rpartition("(at line ")[2].partition(",")[0]
    lines = text.splitlines() or [""]
    return lines[int(number) - 1 if number.isdigit() else -1]
