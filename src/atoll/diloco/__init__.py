"""DiLoCo for a training script: `from atoll.diloco import DiLoCo`. Needs `atoll[torch]`.

Names load on first use, as an estimate needs neither torch nor numpy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atoll.diloco.diloco import DiLoCo
    from atoll.diloco.outer import OuterRule
    from atoll.diloco.presets import OuterPreset
    from atoll.diloco.reports import RoundReport
    from atoll.integrations.torchft import ObjectStoreManager

_HOME = {
    "DiLoCo": "diloco.diloco",
    "ObjectStoreManager": "integrations.torchft",
    "OuterPreset": "diloco.presets",
    "OuterRule": "diloco.outer",
    "RoundReport": "diloco.reports",
}

__all__ = [
    "DiLoCo",
    "ObjectStoreManager",
    "OuterPreset",
    "OuterRule",
    "RoundReport",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'atoll.diloco' has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(f"atoll.{_HOME[name]}"), name)
    except ModuleNotFoundError as error:
        from atoll.core.errors import class_without_package

        return class_without_package(name, error, "torch")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
