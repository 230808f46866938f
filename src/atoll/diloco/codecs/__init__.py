"""Codecs: how values become bytes on the way to the store, and values again on the way back.

A codec is a class that extends `Codec` and a row of `CODECS` (docs/architecture.md has the steps).
Encoding keeps no state: what it loses is `values - decode(encode(values))`, and whoever wants error
feedback adds that to the next values.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from atoll.core.errors import ValidationError

if TYPE_CHECKING:
    from atoll.diloco.codecs.frame import Data, Floats

__all__ = ["CODECS", "Codec", "CodecRow", "get_codec", "get_codecs"]


class Codec:
    """A pair of pure functions; safe to call from several threads at once."""

    is_exact = False  # what is decoded has the bits of what was encoded
    needs_finite = True  # there is no code for NaN and infinity
    decay = 1.0  # what stays of what was left out, from one round to the next

    def __init__(self, name: str) -> None:
        self.name = name

    @classmethod
    def with_options(cls, name: str, options: str) -> Codec | None:
        """The codec that users write `name:options`; None if there is none."""
        return None

    def encode(self, values: Floats) -> bytes:
        """One row of float32 as bytes that `decode` alone can read.

        The same values give the same bytes. Codecs that have no code for NaN and infinity raise
        ValidationError naming the first such value.
        """
        raise NotImplementedError

    def decode(self, data: Data, size: int) -> Floats:
        """The `size` values again; raises ValueError if `data` is not what `encode` wrote of them.

        `frame.pack` and `frame.unpack` see to that. The array may be a read-only view of `data`.
        """
        raise NotImplementedError


class CodecRow(NamedTuple):
    """What all of atoll knows of a codec without loading it.

    `home`: module:class, made with the name and `arguments`. `bits` a value and the rates,
    megabytes of fp32 a second on one core, are those of `bench/codecs.py` for normally distributed
    values. `purpose` is for the documents. `mean_codec`: that of the means where it is not the same
    one; errors of uploads average out over the replicas, those of a mean do not. `options`: what
    users may write behind the name, for messages.
    """

    name: str
    home: str
    bits: float
    encode_mb_s: float
    decode_mb_s: float
    purpose: str
    mean_codec: str = ""
    options: str = ""
    arguments: tuple[float, ...] = ()


_DENSE = "atoll.diloco.codecs.dense"
_UNIFORM = f"{_DENSE}:Uniform"

CODECS = {
    row.name: row
    for row in (
        # name, home, bits a value, MB/s encoded, MB/s decoded, purpose
        CodecRow("fp32", f"{_DENSE}:Fp32", 32.0, 5000, 20000, "when bytes do not matter"),
        CodecRow("bf16", f"{_DENSE}:Bf16", 10.6, 360, 670, "always safe"),
        CodecRow("int8", f"{_DENSE}:Int8", 7.6, 420, 840, "safe"),
        CodecRow(
            *("int5", _UNIFORM, 5.1, 400, 850, "means, where uploads are `int3`"),
            arguments=(0.125,),
        ),
        CodecRow(
            *("int4", _UNIFORM, 3.6, 400, 850, "**what to take for 4 bits**"), arguments=(0.36,)
        ),
        CodecRow(
            *("e3m0", f"{_DENSE}:E3m0", 3.6, 410, 870, "the format of the Streaming DiLoCo paper"),
            mean_codec="int4",
        ),
        CodecRow(
            *("int3", _UNIFORM, 3.0, 400, 850, "many replicas"),
            mean_codec="int5",
            arguments=(0.55,),
        ),
        CodecRow(
            *("sparse", "atoll.diloco.codecs.sparse:Sparse", 0.15, 400, 5000),
            "hundreds of rounds, no momentum; `sparse:K/CHUNK@DECAY` for other densities and "
            "decaying feedback",
            options="'sparse:K/CHUNK@DECAY' with the K largest of CHUNK values, a power of two "
            "from 64 to 4096, and a decay of what is left out from 0 to 1",
        ),
    )
}


def get_codec(name: str | Codec, field: str = "codec") -> Codec:
    """The codec called `name`; raises ValidationError listing the names there are."""
    if isinstance(name, Codec):
        return name
    base, colon, options = str(name).partition(":")
    row = CODECS.get(base)
    codec = _load(row, options if colon else None) if row else None
    if codec is None:
        expected = "expected " + " or ".join(map(repr, CODECS))
        expected += "".join(f", or {row.options}" for row in CODECS.values() if row.options)
        raise ValidationError(field, name, expected)
    return codec


def get_codecs(codec: str | Codec, mean_codec: str | Codec | None) -> tuple[Codec, Codec]:
    """Those of uploads and of means, which is the one for such uploads if it is not given."""
    uploads = get_codec(codec)
    row = CODECS.get(uploads.name)
    if mean_codec is None:
        mean_codec = (row and row.mean_codec) or uploads
    return uploads, get_codec(mean_codec, "down_codec")


# Some more than a run uses: names come from manifests, too, and may be anything.
@lru_cache(maxsize=64)
def _load(row: CodecRow, options: str | None) -> Codec | None:
    module, _, name = row.home.partition(":")
    kind = getattr(import_module(module), name)
    codec: Codec | None = (
        kind(row.name, *row.arguments) if options is None else kind.with_options(row.name, options)
    )
    return codec
