"""What a sweep tries, when it stops a training early, and what it starts next. Pure.

The same texts always give the same settings in the same order, so that a sweep can be resumed.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import random
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from atoll.core.errors import ValidationError
from atoll.core.select import OPERATORS, parse_requirement
from atoll.core.settings import (
    MAX_DISPLAY_CHARS,
    Setting,
    Settings,
    check_settings,
    dns_label,
    parse_pair,
    parse_value,
    setting_text,
)

MAX_TRAININGS = 100_000  # more settings are a mistake: a list of them takes minutes to store
_NAME_CHARS = MAX_DISPLAY_CHARS - 10  # of a name before the digest that keeps it unique
_RANGE = re.compile(r"(?P<low>[^,]+?)\.\.(?P<high>[^,:]+)(?P<log>:log)?")
_STEP = re.compile(r"(?P<condition>.*?)(?:@(?P<step>\d{1,15}))?", re.DOTALL)

T = TypeVar("T")


class Range(NamedTuple):
    """Numbers to draw from: whole ones if both ends are, `is_log` with equal odds per decade."""

    low: float
    high: float
    is_log: bool = False

    def draw(self, dice: random.Random) -> Setting:
        if isinstance(self.low, int) and isinstance(self.high, int) and not self.is_log:
            return dice.randint(self.low, self.high)
        if self.is_log:
            value = math.exp(dice.uniform(math.log(self.low), math.log(self.high)))
        else:
            value = dice.uniform(self.low, self.high)
        return float(f"{value:.4g}")  # more digits only make a name longer


Space = dict[str, list[Setting] | Range]


def parse_space(texts: Iterable[str], field: str = "--set") -> Space:
    """`lr=0.1,0.3` is a list of values, `lr=1e-4..1e-1:log` a range. Raises ValidationError."""
    space: Space = {}
    for text in texts:
        name, value = parse_pair(field, text)
        if name in space:
            raise ValidationError(field, text, f"expected {name} once")
        check_settings(field, {name: value})
        space[name] = _parse_range(field, text, value) or _parse_list(field, text, value)
    return space


def _parse_range(field: str, text: str, value: str) -> Range | None:
    match = _RANGE.fullmatch(value)
    if match is None:
        return None
    low, high = parse_value(match["low"]), parse_value(match["high"])
    is_log = match["log"] is not None
    if isinstance(low, str | bool) or isinstance(high, str | bool) or low >= high:
        raise ValidationError(field, text, "expected two numbers, the lower one first")
    if is_log and low <= 0:
        raise ValidationError(field, text, "expected numbers above 0 for a logarithmic range")
    return Range(low, high, is_log)


def _parse_list(field: str, text: str, value: str) -> list[Setting]:
    values = [parse_value(part.strip()) for part in value.split(",")]
    if "" in values:
        raise ValidationError(field, text, "expected NAME=VALUE,VALUE,… or NAME=LOW..HIGH")
    return values


def grid(space: Space) -> list[Settings]:
    """Every combination, the last name varying fastest. Raises ValidationError for a range."""
    lists: list[list[Setting]] = []
    for name, values in space.items():
        if isinstance(values, Range):
            text = f"{name}={values.low}..{values.high}"
            raise ValidationError("--set", text, "expected --samples with a range")
        lists.append(values)
    count = math.prod(map(len, lists))
    if count > MAX_TRAININGS:
        raise ValidationError("--set", f"{count} combinations", f"expected {MAX_TRAININGS} at most")
    return [dict(zip(space, values, strict=True)) for values in itertools.product(*lists)]


def sample(space: Space, count: int, seed: int) -> list[Settings]:
    """`count` random combinations, none twice; fewer if there are no more."""
    dice, drawn = random.Random(seed), dict[str, Settings]()
    for _ in range(20 * count):  # of lists alone there may be fewer than wanted
        if len(drawn) == count:
            break
        settings: Settings = {
            name: values.draw(dice) if isinstance(values, Range) else dice.choice(values)
            for name, values in space.items()
        }
        drawn.setdefault(json.dumps(settings), settings)
    return list(drawn.values())


def parse_file(path: str, text: str) -> list[Settings]:
    """Settings of a file: JSON (a list of objects), JSON lines or CSV with a header."""
    field = f"--from {path}"
    try:
        if path.endswith(".csv"):
            return _checked(
                field, list(csv.DictReader(io.StringIO(text), strict=True)), is_text=True
            )
        if text.lstrip().startswith("["):
            return _checked(field, json.loads(text))
        return _checked(field, [json.loads(line) for line in text.splitlines() if line.strip()])
    except (ValueError, csv.Error) as error:
        if isinstance(error, ValidationError):
            raise
        expected = "expected a list of JSON objects, one JSON object a line, or CSV (.csv)"
        raise ValidationError(field, text[:40], f"{expected}: {error}") from error


def _checked(field: str, rows: Any, *, is_text: bool = False) -> list[Settings]:
    checked = []
    for at, row in enumerate(rows if isinstance(rows, list) else [rows]):
        where = f"{field}: row {at + 1}"
        if is_text and (None in row or None in row.values()):
            values = [value for value in row.values() if value is not None]
            raise ValidationError(where, values, "expected as many values as the header has names")
        if not isinstance(row, dict):
            raise ValidationError(where, row, "expected a JSON object of names and values")
        settings = {name: parse_value(value) if is_text else value for name, value in row.items()}
        check_settings(where, settings)
        checked.append(settings)
    return checked


def combine(listed: Sequence[Settings], varied: Sequence[Settings]) -> list[Settings]:
    """Each of the listed ones with each of the varied ones; either may be empty."""
    return [{**one, **other} for one in listed or [{}] for other in varied or [{}]]


def render_command(command: Sequence[str], settings: Mapping[str, Setting]) -> list[str]:
    """The command with `{lr}` replaced; a setting that is no value in it is added as `--lr=0.1`.

    A part of a longer word, as in `--out=runs/{lr}`, is no value: the program would run with its
    default. A setting is added as one argument: parsers of `--lr 0.1` take that too, some take only
    that, and -1 is no flag. True is added as `--fast`, and False is not added.
    """
    rendered, unused = [], dict(settings)
    for argument in command:
        for name, value in settings.items():
            if _is_value(name, argument):
                unused.pop(name, None)
            argument = argument.replace(f"{{{name}}}", _argument(value))
        rendered.append(argument)
    for name, value in unused.items():
        if value is not False:
            rendered.append(f"--{name}" if value is True else f"--{name}={_argument(value)}")
    return rendered


def _is_value(name: str, argument: str) -> bool:
    """Whether `{name}` is a word by itself, as in `lr={lr}`."""
    word = re.escape(f"{{{name}}}")
    return re.search(rf"(?<![\w./-]){word}(?![\w./-])", argument) is not None


def _argument(value: Setting) -> str:
    """As Python writes it: all digits, 10.0 for parsers that refuse 10, True for literal_eval."""
    return str(value)


def setting_names(stem: str, all_settings: Sequence[Mapping[str, Setting]]) -> list[str]:
    """A name for each of the settings: `stem-lr0.1-width64`. None is there twice as a label."""
    names: list[str] = []
    labels: set[str] = set()
    for at, settings in enumerate(all_settings):
        text = "".join(f"-{name}{setting_text(value)}" for name, value in settings.items())
        name = re.sub(r"[^\w.+=,@-]+", "-", f"{stem}{text}")[:_NAME_CHARS]
        while (label := dns_label(name)) in labels:
            name = f"{name[:_NAME_CHARS]}-{at + 1}"
            at += len(all_settings)
        labels.add(label)
        names.append(name)
    return names


class StopRule(NamedTuple):
    """`loss>5@500`: stop a training whose loss is above 5 at step 500 or later."""

    metric: str
    operator: str
    value: float
    step: int = 0

    @classmethod
    def parse(cls, text: str, field: str = "--stop-when") -> StopRule:
        match = _STEP.fullmatch(text.strip())
        assert match is not None
        requirement = parse_requirement(field, match["condition"])
        value = parse_value(requirement.value)
        if not requirement.operator or isinstance(value, bool | str):
            expected = "expected METRIC, one of < <= > >= =, a number, and @STEP if you like: "
            raise ValidationError(field, text, f"{expected}loss>5@500")
        return cls(requirement.name, requirement.operator, value, int(match["step"] or 0))

    def holds(self, value: float, step: int | None) -> bool:
        """What is not a number holds for every rule: it does not get better."""
        if self.step and (step is None or step < self.step):
            return False
        return math.isnan(value) or OPERATORS[self.operator](value, self.value)

    def __str__(self) -> str:
        at = f"@{self.step}" if self.step else ""
        return f"{self.metric}{self.operator}{self.value:g}{at}"


def to_start(jobs: Sequence[T], started: Collection[int], running: int, at_once: int) -> list[T]:
    """The next jobs: in their order, as many as may run beside the `running` ones.

    `started` has the positions of those that have begun.
    """
    waiting = (job for at, job in enumerate(jobs) if at not in started)
    return list(itertools.islice(waiting, max(0, at_once - running)))
