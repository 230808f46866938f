"""Checkpoints of `torch.distributed.checkpoint` in an object store, or in any other that atoll has.

    dcp.save(state, storage_writer=StoreWriter("s3://bucket/run42/step-1000"))
    dcp.load(state, storage_reader=StoreReader("s3://bucket/run42/step-1000"))

PROCESS.NONCE/NUMBER   tensors and bytes of one process, one after the other
.metadata              what is where: written last, so a checkpoint without it is none
"""

from __future__ import annotations

import io
import os
import pickle
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from atoll.core.errors import NotFound
from atoll.objectstore import ObjectStore

OBJECT_BYTES = 256 << 20  # an object is larger only if one tensor is
METADATA = ".metadata"
READERS = 8

Where = str | os.PathLike[str]


@dataclass(frozen=True)
class StoredItem:
    """Where one tensor, or one blob of bytes, is."""

    key: str
    start: int
    stop: int


class StoreWriter(StorageWriter):
    """Writes a checkpoint under `uri`: file:// s3:// gs:// az:// memory://, or a path.

    With `dcp.save(checkpoint_id=…)` that is the URI instead. A process has `OBJECT_BYTES` of
    copies in memory at a time. What an earlier checkpoint left there is deleted at the end.
    """

    def __init__(self, uri: Where | None = None) -> None:
        self._uri = uri
        self._prefix = ""
        self._save_id = secrets.token_hex(8)

    def reset(self, checkpoint_id: Where | None = None) -> None:
        self._uri = self._uri if checkpoint_id is None else checkpoint_id
        self._save_id = secrets.token_hex(8)

    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **__: Any) -> None:
        self._blobs = ObjectStore.open(_stated(self._uri))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        names = [f"{process:05d}.{self._save_id}" for process in range(len(plans))]
        pairs = zip(plans, names, strict=True)
        return [
            SavePlan(plan.items, name, plan.planner_data, getattr(plan, "usable", True))
            for plan, name in pairs
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        pieces: list[memoryview] = []
        number = size = 0

        def put() -> None:
            nonlocal number, size
            if pieces:
                self._blobs.put(f"{plan.storage_data}/{number:05d}", pieces)
            pieces.clear()
            number, size = number + 1, 0

        for item in plan.items:
            data = _bytes_of(item, planner)
            if pieces and size + data.nbytes > OBJECT_BYTES:
                put()
            stored = StoredItem(f"{plan.storage_data}/{number:05d}", size, size + data.nbytes)
            results.append(
                WriteResult(index=item.index, size_in_bytes=data.nbytes, storage_data=stored)
            )
            pieces.append(data)
            size += data.nbytes
        put()
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        metadata.storage_data = {each.index: each.storage_data for part in results for each in part}
        metadata.storage_meta = self.storage_meta()
        self._blobs.put(METADATA, pickle.dumps(metadata))
        needed = {each.key for each in metadata.storage_data.values()}
        others = [blob.key for blob in self._blobs.list("") if _is_data(blob.key)]
        self._blobs.delete(key for key in others if key not in needed)

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=str(self._uri), save_id=self._save_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Where) -> bool:
        return _is_uri(checkpoint_id)


class StoreReader(StorageReader):
    """Reads what a `StoreWriter` wrote, into a model that may be cut otherwise.

    As with torch's own readers, what is read has to be trusted: the list of what is where is a
    pickle.
    """

    def __init__(self, uri: Where | None = None) -> None:
        self._uri = uri
        self._where: dict[MetadataIndex, StoredItem] = {}

    def reset(self, checkpoint_id: Where | None = None) -> None:
        self._uri = self._uri if checkpoint_id is None else checkpoint_id
        self._where = {}

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        uri = _stated(self._uri)
        try:
            metadata: Metadata = pickle.loads(ObjectStore.open(uri).get(METADATA))
        except NotFound as error:
            raise NotFound("checkpoint", str(uri)) from error
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any
    ) -> None:
        self._blobs = ObjectStore.open(_stated(self._uri))
        self._where = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        with ThreadPoolExecutor(READERS) as pool:
            for batch in _batches(plan.items, READERS):
                for item, data in zip(batch, pool.map(self._read, batch), strict=True):
                    _give(item, data, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read(self, item: ReadItem) -> memoryview:
        stored = self._where[item.storage_index]
        return self._blobs.get(stored.key, stored.start, stored.stop)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Where) -> bool:
        return _is_uri(checkpoint_id)


def _batches(items: list[ReadItem], size: int) -> Iterator[list[ReadItem]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _bytes_of(item: WriteItem, planner: SavePlanner) -> memoryview:
    data = planner.resolve_data(item)
    if item.type == WriteItemType.BYTE_IO:
        assert isinstance(data, io.BytesIO)
        return data.getbuffer()
    assert isinstance(data, torch.Tensor)
    buffer = io.BytesIO()
    # A view would be stored with all of what it is a view of.
    torch.save(data.detach().cpu().contiguous().clone(), buffer)
    return buffer.getbuffer()


def _give(item: ReadItem, data: memoryview, planner: LoadPlanner) -> None:
    if item.type == LoadItemType.BYTE_IO:
        planner.load_bytes(item, io.BytesIO(data))
        return
    tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    target = planner.resolve_tensor(item).detach()
    target.copy_(tensor)
    planner.commit_tensor(item, target)


def _is_data(key: str) -> bool:
    folder, _, name = key.partition("/")
    process, _, nonce = folder.partition(".")
    return process.isdigit() and len(nonce) == 16 and name.isdigit()


def _stated(uri: Where | None) -> Where:
    if uri is None:
        raise ValueError("expected StoreWriter(uri) or checkpoint_id=")
    return uri


def _is_uri(checkpoint_id: Where) -> bool:
    from atoll.core.errors import ValidationError

    try:
        ObjectStore.open(checkpoint_id)
    except ValidationError:
        return False
    return True
