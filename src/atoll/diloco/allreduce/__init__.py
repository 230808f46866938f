"""All-reduce through an object store: every replica ends a round with the same bits."""

from __future__ import annotations

from atoll.diloco.allreduce.allreduce import ObjectStoreAllReduce
from atoll.diloco.allreduce.catchup import Checkpoint, JoinState, Mean
from atoll.diloco.allreduce.work import ReduceReport

__all__ = ["Checkpoint", "JoinState", "Mean", "ObjectStoreAllReduce", "ReduceReport"]
