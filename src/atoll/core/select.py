"""Which trainings of a list, and in which order: by label, setting and metric. Pure."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from atoll.core.errors import ValidationError
from atoll.core.settings import Setting, parse_value
from atoll.core.status import Training

# The longest first: `<=` is no `<`.
OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
    "=": operator.eq,
}
_REQUIREMENT = re.compile(
    r"(?P<name>[^<>=!]+)(?:(?P<operator>[<>!]=|[<>=])(?P<value>.*))?", re.DOTALL
)
# What a list can be sorted by, in addition to labels, settings and metrics.
FIELDS: dict[str, Callable[[Training, float], Any]] = {
    "age": lambda training, now: now - training.created_at,
    "name": lambda training, now: training.display_name,
    "phase": lambda training, now: training.status.phase.value,
    "ran": lambda training, now: training.status.ran_for(now) or -1.0,
    "ready": lambda training, now: training.status.world.ready,
}
AGGREGATES = ("last", "min", "max")  # of a metric, over the training

Metrics = Mapping[tuple[str, str, str], float]  # by uid, aggregate and name


class Requirement(NamedTuple):
    """`lr>=0.1`, or `lr`: that there is one."""

    name: str
    operator: str = ""
    value: str = ""

    def holds(self, value: Setting | None) -> bool:
        """Numbers compare as numbers if both are; else only `=` and `!=` can hold."""
        if value is None:
            return self.operator == "!="
        if not self.operator:
            return True
        expected = parse_value(self.value)
        is_ordered = _is_number(value) and _is_number(expected)
        if self.operator in ("=", "!="):
            is_equal = value == expected if is_ordered else _text(value) == self.value
            return is_equal == (self.operator == "=")
        return is_ordered and OPERATORS[self.operator](value, expected)


class Sort(NamedTuple):
    """`-setting:lr` by that setting, the largest first; `loss` by the newest value of a metric."""

    kind: str  # field, label, setting, or an aggregate of a metric
    name: str
    is_reversed: bool = False


def parse_requirement(field: str, text: str) -> Requirement:
    match = _REQUIREMENT.fullmatch(text.strip())
    if match is None or not match["name"].strip():
        raise ValidationError(
            field, text, f"expected NAME, or NAME and a value with one of {' '.join(OPERATORS)}"
        )
    return Requirement(
        match["name"].strip(), match["operator"] or "", (match["value"] or "").strip()
    )


def parse_condition(field: str, text: str) -> Requirement:
    """As `parse_requirement`, and one that could hold: only numbers are less or more."""
    requirement = parse_requirement(field, text)
    is_ordered = requirement.operator not in ("", "=", "!=")
    if is_ordered and not _is_number(parse_value(requirement.value)):
        raise ValidationError(field, text, f"expected a number after {requirement.operator}")
    return requirement


def parse_metric(field: str, text: str) -> tuple[str, Requirement]:
    """`min:loss<2`: the aggregate, `last` if none is named, and the requirement."""
    requirement = parse_requirement(field, text)
    if not requirement.operator or not _is_number(parse_value(requirement.value)):
        raise ValidationError(field, text, "expected a condition such as loss<2 or min:loss<2")
    aggregate, name = _prefixed(requirement.name, AGGREGATES, "last")
    return aggregate, requirement._replace(name=name)


def parse_sort(field: str, text: str) -> Sort:
    name, is_reversed = text.removeprefix("-"), text.startswith("-")
    if name in FIELDS:
        return Sort("field", name, is_reversed)
    kind, name = _prefixed(name, ("label", "setting", *AGGREGATES), "last")
    if not name:
        expected = f"expected one of {', '.join(FIELDS)}, label:NAME, setting:NAME or a metric"
        raise ValidationError(field, text, expected)
    return Sort(kind, name, is_reversed)


def _prefixed(text: str, kinds: Sequence[str], default: str) -> tuple[str, str]:
    kind, is_prefixed, name = text.partition(":")
    return (kind, name) if is_prefixed and kind in kinds else (default, text)


class Selection(NamedTuple):
    labels: tuple[Requirement, ...] = ()
    settings: tuple[Requirement, ...] = ()
    metrics: tuple[tuple[str, Requirement], ...] = ()
    sort: Sort | None = None

    @classmethod
    def parse(
        cls,
        labels: Iterable[str] = (),
        settings: Iterable[str] = (),
        metrics: Iterable[str] = (),
        sort: str | None = None,
    ) -> Selection:
        """Raises ValidationError."""
        return cls(
            tuple(parse_condition("label", text) for text in labels),
            tuple(parse_condition("setting", text) for text in settings),
            tuple(parse_metric("metric", text) for text in metrics),
            None if sort is None else parse_sort("sort", sort),
        )

    @property
    def metric_names(self) -> list[str]:
        """Metrics that it needs of each training."""
        names = [each.name for _, each in self.metrics]
        if self.sort is not None and self.sort.kind in AGGREGATES:
            names.append(self.sort.name)
        return list(dict.fromkeys(names))

    def matches(self, training: Training, metrics: Metrics) -> bool:
        labels = training.spec.labels
        settings = training.settings if self.settings else {}
        return (
            all(each.holds(labels.get(each.name)) for each in self.labels)
            and all(each.holds(_lookup(settings, each.name)) for each in self.settings)
            and all(
                each.holds(metrics.get((training.uid, kind, each.name)))
                for kind, each in self.metrics
            )
        )

    def order(self, trainings: Iterable[Training], metrics: Metrics, now: float) -> list[Training]:
        """The newest first among equals; those without the value are last in either direction."""
        by_age = sorted(trainings, key=lambda training: -training.created_at)
        sort = self.sort
        if sort is None:
            return by_age
        keys = {each.uid: _key(_value(each, sort, metrics, now)) for each in by_age}
        known = [each for each in by_age if keys[each.uid][0] == 0]
        known.sort(key=lambda each: keys[each.uid], reverse=sort.is_reversed)
        others = [each for each in by_age if keys[each.uid][0] > 0]
        return known + sorted(others, key=lambda each: keys[each.uid])


def _value(training: Training, sort: Sort, metrics: Metrics, now: float) -> Any:
    match sort.kind:
        case "field":
            return FIELDS[sort.name](training, now)
        case "label":
            value = training.spec.labels.get(sort.name)
            return None if value is None else parse_value(value)
        case "setting":
            return _lookup(training.settings, sort.name)
    return metrics.get((training.uid, sort.kind, sort.name))


def _lookup(settings: Mapping[str, Setting], name: str) -> Setting | None:
    """`batch_size` finds `--batch-size`, and the other way round."""
    if name in settings:
        return settings[name]
    identifier = name.replace("-", "_")
    return next((settings[key] for key in settings if key.replace("-", "_") == identifier), None)


def _key(value: Any) -> tuple[int, int, Any]:
    """Numbers before texts; what is not a number, and what is missing, after all of them."""
    if value is None:
        return 2, 0, 0
    if isinstance(value, float) and math.isnan(value):
        return 1, 0, 0
    return (0, 0, value) if _is_number(value) else (0, 1, str(value))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _text(value: Setting) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
