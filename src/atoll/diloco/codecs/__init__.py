"""Codecs: how values become bytes on the way to the store, and values again on the way back.

`CODECS` names them all. Encoding keeps no state: what it loses is
`values - decode(encode(values))`, and whoever wants error feedback adds that to the next values.
"""

from __future__ import annotations

from typing import Protocol

from atoll.core.errors import ValidationError
from atoll.diloco.codecs.dense import Bf16, E3m0, Fp32, Int8, Uniform
from atoll.diloco.codecs.frame import Data, Floats
from atoll.diloco.codecs.sparse import Sparse

__all__ = ["CODECS", "Codec", "get_codec"]


class Codec(Protocol):
    """A pair of pure functions; safe to call from several threads at once."""

    @property
    def name(self) -> str: ...

    @property
    def is_exact(self) -> bool: ...

    @property
    def needs_finite(self) -> bool: ...

    def encode(self, values: Floats) -> bytes:
        """One row of float32 as bytes that `decode` alone can read.

        The same values give the same bytes. Codecs that have no code for NaN and infinity raise
        ValidationError naming the first such value.
        """

    def decode(self, data: Data, size: int) -> Floats:
        """The `size` values again; raises ValueError if `data` does not hold that many.

        The array may be a read-only view of `data`.
        """


# | name   | bits a value | what is lost                       | good for                    |
# |--------|--------------|------------------------------------|-----------------------------|
# | fp32   | 32           | nothing                            | when bytes do not matter    |
# | bf16   | about 11     | mantissa bits beyond 8             | always safe                 |
# | int8   | about 7.6    | below 1/254 of the block's largest | safe with error feedback    |
# | int5   | about 5.1    | 4 % of the root mean square        | with error feedback         |
# | int4   | about 3.6    | 10 %                               | DiLoCo, with error feedback |
# | e3m0   | about 3.6    | 19 %: all but a power of two       | DiLoCo, with error feedback |
# | int3   | about 3.0    | 16 %                               | many replicas, uploads only |
# | sparse | about 0.15   | all but the 1.6 % largest          | many rounds, no momentum    |
CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        Fp32(),
        Bf16(),
        Int8(),
        Uniform("int5", 0.125),
        Uniform("int4", 0.36),
        E3m0(),
        Uniform("int3", 0.55),
        Sparse(),
    )
}


def get_codec(name: str | Codec, field: str = "codec") -> Codec:
    """The codec called `name`; raises ValidationError listing the names there are."""
    if not isinstance(name, str) and hasattr(name, "encode"):
        return name
    codec = (CODECS.get(name) or Sparse.named(name)) if isinstance(name, str) else None
    if codec is None:
        raise ValidationError(
            field,
            name,
            "expected " + " or ".join(map(repr, CODECS)) + ", or 'sparse:K/CHUNK@DECAY' with the K "
            "largest of CHUNK values, a power of two from 64 to 4096, and a decay of what is left "
            "out from 0 to 1",
        )
    return codec
