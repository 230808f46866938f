"""A delta of weights by ModelExpress itself, for `bench/weights.py --peer`.

PYTHON bench/peers/weights.py FOLDER reads `old.npz` and `new.npz` there, tensors as bytes, and
prints the bytes stored and GB/s a core, as JSON. It stages and publishes with the publication
method of ModelExpress, on one worker, and applies with its receiver to a mapped file; only its
service and its S3 client are stood in for. PYTHON needs modelexpress 0.7.0, installed with
--no-deps, and of its dependencies grpcio, protobuf<7, pydantic, boto3, huggingface_hub, zstandard,
google-crc32c, safetensors, numpy and torch==2.13.0.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["MX_REFIT_DELTA_WORKERS"] = "1"

import numpy as np
import torch
from modelexpress_rl import WeightVersionRef, refit_pb2
from modelexpress_rl.inference.receiver import _LocalCheckpoint
from modelexpress_rl.train.methods import CanonicalDeltaPublicationMethod

RUNS = 5
URI = "s3://bucket/1/index.json"


class Stored(dict[str, bytes]):
    """An S3 client that keeps what it is given."""

    def put(self, uri: str, data: bytes) -> None:
        self[uri.rsplit("/", 1)[1]] = data


def publication(s3: Stored, old: dict[str, Any]) -> CanonicalDeltaPublicationMethod:
    target = refit_pb2.WeightVersion(
        uid="1",
        model_name="m",
        payload_format=refit_pb2.WEIGHT_PAYLOAD_FORMAT_XOR_DELTA,
        base_version_id="0",
        object_storage={"storage_type": refit_pb2.OBJECT_STORAGE_TYPE_S3, "uri": URI},
    )
    response = refit_pb2.GetWeightVersionResponse(version=target)
    method = CanonicalDeltaPublicationMethod(
        config=SimpleNamespace(initial_base_version_id="0", uri_prefix="s3://bucket"),
        model_name="m",
        service=lambda: SimpleNamespace(GetWeightVersion=lambda _, timeout: response),
        rpc_timeout_seconds=1,
        process_group=None,
        read_seed_tensor=old.__getitem__,
        s3=s3,
    )
    method.prepare_base(hf_tensor_iter=buckets(old))
    return method


def buckets(tensors: dict[str, Any]) -> list[list[tuple[str, torch.Tensor]]]:
    return [[(name, torch.from_numpy(each))] for name, each in tensors.items()]


def apply(file: Path, stored: Stored, old: dict[str, Any], new: dict[str, Any]) -> float:
    """Processor seconds that the receiver takes, on a file of the old values."""
    file.write_bytes(b"".join(each.tobytes() for each in old.values()))
    locations, start = {}, 0
    for name, each in old.items():
        locations[name] = (file, start, each.size)
        start += each.size
    index = json.loads(stored["index.json"])
    shards = {
        shard: (stored[shard], [name for name, at in index["weight_map"].items() if at == shard])
        for shard in set(index["weight_map"].values())
    }
    receiver = SimpleNamespace(locations=locations)
    began = time.process_time()
    _LocalCheckpoint._apply_shards(receiver, shards, index_metadata=index["metadata"])
    took = time.process_time() - began
    assert file.read_bytes() == b"".join(each.tobytes() for each in new.values())
    return took


def main() -> None:
    folder = Path(sys.argv[1])
    old, new = (dict(np.load(folder / f"{name}.npz")) for name in ("old", "new"))
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    encode_s, apply_s = [], []
    for _ in range(RUNS):
        stored = Stored()
        method = publication(stored, old)
        ref = WeightVersionRef("1")
        began = time.process_time()
        staged = method.stage(version=ref, hf_tensor_iter=buckets(new))
        method.publish(version=ref, staged=staged)
        encode_s.append(time.process_time() - began)
        apply_s.append(apply(folder / "base", stored, old, new))
    size = sum(each.size for each in new.values()) / 1e9
    result = {
        "version": version("modelexpress"),
        "bytes": sum(map(len, stored.values())),
        "encode_gb_s": round(size / min(encode_s), 2),
        "apply_gb_s": round(size / min(apply_s), 2),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
