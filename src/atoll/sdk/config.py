"""Where `atoll.toml` is, and the defaults it has for a training."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from atoll.backends.local.state import home
from atoll.core.errors import Permanent, ValidationError
from atoll.core.executors import LOCAL
from atoll.files.ownership import read_own

if TYPE_CHECKING:
    from atoll.core.config import Config
    from atoll.core.spec import TrainingSpec
    from atoll.sdk.effects import Pack

NAME = "atoll.toml"
VARIABLE = "ATOLL_CONFIG"
# Options that belong to one training.
NO_DEFAULTS = ("command", "source", "args", "replace", "wait", "timeout")
MERGED = ("env", "nccl_env", "labels", "settings")


def find() -> Path | None:
    """The file for a command: ATOLL_CONFIG, else the one in the working directory, else the
    user's own."""
    if not os.environ.get(VARIABLE) and os.path.lexists(NAME):
        return Path(NAME).absolute()
    return find_own()


def find_own() -> Path | None:
    """The file for the control plane of this user: ATOLL_CONFIG, else the user's own.

    Not the one in the working directory: the control plane works for all directories, and goes on
    when the command that started it has ended.
    """
    if chosen := os.environ.get(VARIABLE):
        return Path(chosen).absolute()
    path = _own_path()
    return path if path is not None and path.is_file() else None


def _own_path() -> Path | None:
    if base := os.environ.get("XDG_CONFIG_HOME"):
        return Path(base).absolute() / "atoll" / NAME
    user = home()
    return None if user is None else user / ".config" / "atoll" / NAME


def read(path: Path | None) -> Config:
    """The configuration in a file; the defaults without one.

    Raises Permanent if it cannot be read or somebody else could choose what is in it, whether it
    was found or named: a file that is named once is not checked by its user before each use. Raises
    ValidationError naming the file, the field, its value and what would be right.
    """
    from atoll.core.config import Config, in_file, parse

    if path is None:
        return Config()
    path = path.absolute()
    try:
        content = read_own(path)
        text = content.decode()
    except OSError as error:
        raise Permanent(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValidationError(str(path), content[:40], "expected text in UTF-8") from error
    config = parse(text, str(path), digest_of(content))
    try:
        _check_defaults(config.defaults)
    except ValidationError as error:
        raise in_file(config.path, error, "defaults") from error
    return config


def read_for_plane(path: Path | None = None) -> Config:
    """What a control plane of this user is configured with: that file, or the one that `find_own`
    finds. Raises as `read` does."""
    from atoll.core.config import in_file

    config = read(path or find_own())
    default = config.defaults.get("executor", LOCAL)
    if default not in config.executors:
        expected = f"expected one of {', '.join(config.executors)}"
        raise in_file(config.path, ValidationError("executor", default, expected), "defaults")
    return config


def digest_of(content: bytes) -> str:
    import hashlib

    return hashlib.sha256(content).hexdigest()


def is_changed(config: Config) -> bool:
    """Whether the file is another one now than when it was read."""
    if config.path is None:
        return False
    try:
        return digest_of(Path(config.path).read_bytes()) != config.digest
    except OSError:
        return True


def _check_defaults(defaults: Mapping[str, Any]) -> None:
    from atoll.sdk.options import DeployOptions, spec_of

    for name, value in defaults.items():
        if name in NO_DEFAULTS:
            raise ValidationError(name, value, "expected none: set it for each training")
    # Checked as for a training: the same names, bounds and choices.
    options: DeployOptions = {"command": ["true"], **as_options(defaults, Path())}  # type: ignore[typeddict-item]
    spec_of("defaults", options)


def _check_only_defaults(config: Config) -> None:
    """Raises ValidationError for settings of the control plane in a file of a working directory,
    which the control plane does not read."""
    from atoll.core.config import Config

    expected = (
        f"expected [defaults] alone in a working directory: move this to {_own_path()}, which the "
        "control plane reads, or name the file with --config"
    )
    if config.executors != Config().executors:
        names = [name for name, each in config.executors.items() if each.options or name != LOCAL]
        raise ValidationError(f"{config.path}: executors", names, expected)
    if config.round_stores:
        uris = [store.uri for store in config.round_stores]
        raise ValidationError(f"{config.path}: rounds.stores", uris, expected)
    if config.webhooks:
        urls = [webhook.url for webhook in config.webhooks]
        raise ValidationError(f"{config.path}: webhooks", urls, expected)


def as_options(defaults: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """The table as options of `deploy_distributed`. Paths are relative to the file."""
    from atoll.core.config import options_of
    from atoll.core.spec import ProviderFilter, WorldSize

    options = dict(defaults)
    for name, kind in (("world_size", WorldSize), ("provider_filter", ProviderFilter)):
        if isinstance(options.get(name), dict):
            try:
                options[name] = options_of(kind, options[name])
            except ValidationError as error:
                field = f"{name}.{error.field.removeprefix(f'{name}.')}"
                raise ValidationError(field, error.value, error.expected) from error
    if isinstance(options.get("working_dir"), str):
        options["working_dir"] = directory / options["working_dir"]
    return options


def with_defaults(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the caller over the defaults of the file; `env` is merged by name."""
    stated = {name: value for name, value in options.items() if value is not None}
    if (path := find()) is None:
        return stated
    config = read(path)
    if path != find_own():
        _check_only_defaults(config)
    directory = Path(config.path).parent if config.path else Path()
    defaults = as_options(config.defaults, directory)
    for name in MERGED:
        if name in defaults and isinstance(stated.get(name), Mapping):
            stated[name] = {**defaults[name], **stated[name]}
    return {**defaults, **stated}


def resolve_spec(name: str, options: Mapping[str, Any]) -> TrainingSpec:
    """The spec; options of the caller take precedence over `[defaults]` of atoll.toml."""
    from atoll.sdk.options import DeployOptions, spec_of

    return spec_of(name, cast(DeployOptions, with_defaults(options)))


def resolve_training(name: str, options: Mapping[str, Any]) -> tuple[TrainingSpec, Pack | None]:
    """The spec, and the code that goes with it if its ranks run elsewhere."""
    from atoll.sdk.options import DeployOptions, pack_of, spec_of

    options = with_defaults(options)
    spec = spec_of(name, cast(DeployOptions, options))
    return spec, pack_of(spec, options)
