"""Bits a value, relative error and speed of every codec, on values like gradients.

The speed is of one core, by processor time, so that other work on the machine does not count.

nice python bench/codecs.py
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from pathlib import Path

import numpy as np

from atoll.diloco.codecs import CODECS, Codec, get_codec

SIZE = 1 << 21
RUNS = 3
RESULTS = Path(__file__).resolve().parent / "results" / "codecs.json"


def measure(codec: Codec, row: np.ndarray) -> dict[str, float]:
    encode_s, decode_s = [], []
    for _ in range(RUNS):
        began = time.process_time()
        data = codec.encode(row)
        middle = time.process_time()
        out = codec.decode(data, row.size)
        encode_s.append(middle - began)
        decode_s.append(time.process_time() - middle)
    megabytes = row.nbytes / 1e6
    one_way = statistics.median(encode_s), statistics.median(decode_s)
    return {
        "bits": round(len(data) * 8 / row.size, 3),
        "relative_error": round(float(np.linalg.norm(out - row) / np.linalg.norm(row)), 4),
        "encode_mb_s": round(megabytes / one_way[0]),
        "decode_mb_s": round(megabytes / one_way[1]),
        "both_mb_s": round(megabytes / sum(one_way)),
    }


def main() -> None:
    dice = np.random.default_rng(0)
    rows = {
        "normal": dice.standard_normal(SIZE).astype(np.float32) * 1e-3,
        "heavy tails": dice.standard_t(4, SIZE).astype(np.float32) * 1e-3,
    }
    matches = {
        kind: {name: measure(get_codec(name), row) for name in CODECS} for kind, row in rows.items()
    }
    for kind, codecs in matches.items():
        print(f"{kind}: bits a value, relative error, MB/s of fp32 encoded, decoded, both")
        for name, f in codecs.items():
            print(f"  {name:<7} {f['bits']:7.3f} {f['relative_error']:8.4f}", end="")
            print(f" {f['encode_mb_s']:7} {f['decode_mb_s']:7} {f['both_mb_s']:7}")
    machine = {
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"machine": machine, "codecs": matches}, indent=2) + "\n")


if __name__ == "__main__":
    main()
