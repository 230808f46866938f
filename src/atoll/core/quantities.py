"""The one parser and printer of durations, quantities and sizes.

Durations are what people write: `30s`, `5m`, `2h`, or a plain number of seconds. Quantities are
those of Kubernetes: `2`, `500m`, `4Gi`, `1048576Ki`.
"""

from __future__ import annotations

import math
import re

from atoll.core.errors import ValidationError

DURATION_EXAMPLES = "30s, 5m, 2h, 7d or a number of seconds"
_UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400}
# As Kubernetes has it: decimal suffixes with a small k, binary ones with a capital K.
QUANTITY_PATTERN = r"^[0-9]+(\.[0-9]+)?(m|k|[MGTPE]|[KMGTPE]i)?$"
_QUANTITY = re.compile(QUANTITY_PATTERN)
_SCALE = {"": 1.0, "m": 1e-3}
_SCALE |= {suffix: 1000.0**power for power, suffix in enumerate("kMGTPE", 1)}
_SCALE |= {f"{suffix}i": 1024.0**power for power, suffix in enumerate("KMGTPE", 1)}
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ms|[smhd])")


def parse_duration(field: str, value: str | int | float) -> float:
    """Seconds for `90`, `"90"`, `"30s"`, `"1h30m"`. Raises ValidationError, which names `field`."""
    expected = f"expected {DURATION_EXAMPLES}"
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValidationError(field, value, expected)
    text = str(value).strip()
    try:
        seconds = float(text)
    except ValueError:
        parts = _PART.findall(text)
        if not parts or "".join(number + unit for number, unit in parts) != text:
            raise ValidationError(field, value, expected) from None
        seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
    if math.isnan(seconds) or seconds < 0:
        raise ValidationError(field, value, expected)
    return seconds


def format_duration(seconds: float) -> str:
    """`0.4s`, `12s`, `3m05s`, `2h10m`, `3d04h`."""
    rounded = int(seconds)
    if seconds < 10:
        return f"{seconds:.1f}s"
    if rounded < 60:
        return f"{rounded}s"
    if rounded < 3600:
        return f"{rounded // 60}m{rounded % 60:02}s"
    if rounded < 86_400:
        return f"{rounded // 3600}h{rounded // 60 % 60:02}m"
    return f"{rounded // 86_400}d{rounded // 3600 % 24:02}h"


def check_quantity(field: str, value: object) -> None:
    """Raises ValidationError unless it is None or a quantity of Kubernetes."""
    if value is not None and not (isinstance(value, str) and _QUANTITY.fullmatch(value)):
        expected = "expected a quantity such as '2', '500m', '4Gi' or '1048576Ki'"
        raise ValidationError(field, value, expected)


def parse_quantity(text: str) -> float:
    """The number for `2`, `500m` (0.5), `4Gi` (4294967296). The spec has checked the text."""
    digits = text.rstrip("mkKMGTPEi")
    return float(digits) * _SCALE[text[len(digits) :]]


def format_bytes(count: float) -> str:
    """`812 MiB`, `19.6 GiB`."""
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            share = count / unit
            return f"{share:.0f} {name}" if share >= 100 else f"{share:.1f} {name}"
    return f"{count:.0f} B"
