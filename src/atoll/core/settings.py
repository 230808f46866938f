"""Settings and labels of a training: what was varied, and what people call it. Pure.

Settings come from the flags of the command, from `settings=` and from `atoll.report_settings` in a
rank; of two with the same name the later of these counts. Labels are given, and never found out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from atoll.core.checks import TEXT, is_text
from atoll.core.errors import ValidationError

Setting = bool | int | float | str
Settings = dict[str, Setting]

GROUP = "group"  # the label of trainings that belong together: a sweep is one row in a list
MAX_ENTRIES = 200  # of settings or labels of a training: argparse has fewer, a page shows fewer
MAX_KEY_CHARS = 100
MAX_VALUE_CHARS = 1000  # a path or a sentence; data belongs in a file
MAX_INTEGER = 2**53  # larger ones are not exact in every language that reads them
MAX_LABEL_CHARS = 63  # of a DNS label, which the name of a training has to be
MAX_DISPLAY_CHARS = 200  # of a name as it was given: what a row of a table can show
_DIGEST_CHARS = 8  # two names that differ in other characters only are told apart
# Of a name as people give it: no path, no option, and something to make a label of.
DISPLAY_NAME_PATTERN = r"^(?=.*[A-Za-z0-9])[^/\x00-\x20\x7f-][^/\x00-\x1f\x7f]{0,199}$"
_DISPLAY_NAME = re.compile(DISPLAY_NAME_PATTERN)
_PLAIN = re.compile(r"[A-Za-z0-9 ._+=:,@-]*")
_INTEGER = re.compile(r"[+-]?\d{1,15}")  # longer ones lose digits in other languages
_SCRIPTS = (".py", ".sh", ".bash")


def dns_label(text: str) -> str:
    """The DNS label for a name that people chose: `train-lr0.1` is `train-lr0-1`.

    A name that is a label stays as it is. Raises ValueError for what cannot be a name.
    """
    if not _DISPLAY_NAME.fullmatch(text) or not text.isprintable():
        raise ValueError(text)
    label = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if len(label) <= MAX_LABEL_CHARS and _PLAIN.fullmatch(text):
        return label
    import hashlib  # imported here: it loads slowly

    digest = hashlib.sha256(text.encode(errors="replace")).hexdigest()[:_DIGEST_CHARS]
    return f"{label[: MAX_LABEL_CHARS - 1 - _DIGEST_CHARS].rstrip('-')}-{digest}"


def name_label(field: str, value: object) -> str:
    """As `dns_label`. Raises ValidationError."""
    try:
        return dns_label(value)  # type: ignore[arg-type]
    except (ValueError, TypeError, AttributeError) as error:
        raise ValidationError(
            field,
            value,
            f"expected 1 to {MAX_DISPLAY_CHARS} printable characters without '/', not '-' or a "
            "space first, and at least one of a-z, A-Z and 0-9",
        ) from error


def check_labels(field: str, labels: object) -> None:
    for key, value in _entries(field, labels):
        if not is_text(value) or len(value) > MAX_VALUE_CHARS:
            expected = f"{TEXT}, of at most {MAX_VALUE_CHARS} characters"
            raise ValidationError(f"{field}.{key}", value, expected)


def check_settings(field: str, settings: object) -> None:
    for key, value in _entries(field, settings):
        is_number = isinstance(value, int | float) and abs(value) < math.inf
        if isinstance(value, int) and abs(value) > MAX_INTEGER:
            is_number = False
        if not is_number and not (is_text(value) and len(value) <= MAX_VALUE_CHARS):
            expected = f"expected a finite number, True, False or at most {MAX_VALUE_CHARS}"
            raise ValidationError(f"{field}.{key}", value, f"{expected} characters of text")


def _entries(field: str, entries: object) -> Iterable[tuple[str, Any]]:
    if not isinstance(entries, dict):
        raise ValidationError(field, entries, "expected names and values")
    if len(entries) > MAX_ENTRIES:
        raise ValidationError(field, f"{len(entries)} of them", f"expected at most {MAX_ENTRIES}")
    for key in entries:
        if not is_text(key) or not 1 <= len(key) <= MAX_KEY_CHARS or "=" in key:
            expected = f"expected a name of 1 to {MAX_KEY_CHARS} characters without '='"
            raise ValidationError(field, key, expected)
    return entries.items()


def parse_value(text: str) -> Setting:
    """A number, true or false if the text is one of them; else the text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if _INTEGER.fullmatch(text):
        return int(text)
    try:
        number = float(text)
    except ValueError:
        return text
    return number if math.isfinite(number) and "_" not in text else text


def parse_pair(field: str, text: str) -> tuple[str, str]:
    """`K=V` as a pair. Raises ValidationError."""
    key, is_pair, value = text.partition("=")
    if not is_pair or not key.strip():
        raise ValidationError(field, text, "expected NAME=VALUE")
    return key.strip(), value.strip()


def parse_flags(command: Sequence[str]) -> Settings:
    """What `--flag value`, `--flag=value` and `--flag` of a command set.

    Options before the script belong to Python or torchrun; without a script, those after the
    program count. Values are cut, not refused: a command may have any.
    """
    settings: Settings = {}
    name = ""  # of a flag whose value may follow
    for argument in _arguments(command):
        if argument == "--":
            break
        is_flag = argument.startswith("--")
        is_short = re.match("-[A-Za-z]", argument) is not None  # -v is no value, -1 is
        if name and not is_flag and not is_short:
            settings[name] = parse_value(argument[:MAX_VALUE_CHARS])
            name = ""
            continue
        name = ""
        if not is_flag:
            continue
        key, is_pair, value = argument.removeprefix("--").partition("=")
        if not key or len(key) > MAX_KEY_CHARS or len(settings) == MAX_ENTRIES:
            continue
        settings[key] = parse_value(value[:MAX_VALUE_CHARS]) if is_pair else True
        name = "" if is_pair else key
    return settings


def _arguments(command: Sequence[str]) -> Sequence[str]:
    for at, argument in enumerate(command):
        if argument.endswith(_SCRIPTS):
            return command[at + 1 :]
        if argument == "-m":
            return command[at + 2 :]
        if argument == "-c":
            return ()
    return command[1:]


def merge_settings(
    command: Sequence[str], explicit: Mapping[str, Setting], reported: Mapping[str, Setting]
) -> Settings:
    """All settings of a training, those reported last: a rank knows what it really used.

    A flag and a report of the same setting differ in dashes at the most: `--batch-size` is
    `args.batch_size` in the script.
    """
    settings = {**parse_flags(command), **explicit}
    by_identifier = {name.replace("-", "_"): name for name in settings}
    for name, value in reported.items():
        settings[by_identifier.get(name.replace("-", "_"), name)] = value
    return dict(list(settings.items())[:MAX_ENTRIES])


def setting_text(value: Setting | None) -> str:
    """`0.1`, `true`, `adam`."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def describe_settings(settings: Mapping[str, Setting]) -> str:
    """`lr=0.1 width=64`."""
    return " ".join(f"{name}={setting_text(value)}" for name, value in settings.items())
