"""How float32 values become bytes: the exact codec."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from atoll.core.errors import ValidationError


class Codec(Protocol):
    name: str
    is_exact: bool

    def encode(self, values: NDArray[np.float32]) -> bytes: ...

    def decode(self, data: bytes | memoryview, size: int) -> NDArray[np.float32]: ...


class Fp32:
    name = "fp32"
    is_exact = True

    def encode(self, values: NDArray[np.float32]) -> bytes:
        return values.astype("<f4", copy=False).tobytes()

    def decode(self, data: bytes | memoryview, size: int) -> NDArray[np.float32]:
        if memoryview(data).nbytes != 4 * size:
            raise ValueError(f"{memoryview(data).nbytes} bytes are not {size} float32 values")
        return np.frombuffer(data, "<f4")


def get_codec(name: str) -> Codec:
    if name != "fp32":
        raise ValidationError("codec", name, "expected 'fp32'")
    return Fp32()
