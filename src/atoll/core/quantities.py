"""Durations as people write them: `30s`, `5m`, `2h`, or a plain number of seconds."""

from __future__ import annotations

import math
import re

from atoll.core.errors import ValidationError

DURATION_EXAMPLES = "30s, 5m, 2h, 7d or a number of seconds"
_UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400}
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
    whole = int(seconds)
    if seconds < 10:
        return f"{seconds:.1f}s"
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86_400:
        return f"{whole // 3600}h{whole // 60 % 60:02}m"
    return f"{whole // 86_400}d{whole // 3600 % 24:02}h"
