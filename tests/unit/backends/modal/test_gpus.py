from __future__ import annotations

from typing import Any

import pytest

from atoll.backends.modal.gpus import gpu_of
from atoll.core.spec import Resources


@pytest.mark.parametrize(
    ("needs", "default", "name"),
    [
        ({}, "H100", None),
        ({"gpu_count": 1, "gpu_models": ["H100"]}, None, "H100"),
        ({"gpu_count": 8, "gpu_models": ["h200"]}, None, "H200:8"),
        ({"gpu_count": 2, "gpu_models": ["A10G"]}, None, "A10:2"),
        ({"gpu_count": 2}, "B200", "B200:2"),
        ({"gpu_count": 1, "gpu_models": ["A100"], "min_gpu_memory_gb": 80}, None, "A100-80GB"),
        ({"gpu_count": 1, "gpu_models": ["A100"], "min_gpu_memory_gb": 40}, None, "A100"),
    ],
)
def test_gpus_in_modals_words(needs: dict[str, Any], default: str | None, name: str) -> None:
    assert gpu_of(Resources(**needs), default) == name
