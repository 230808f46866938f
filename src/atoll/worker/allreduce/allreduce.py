"""`atoll.worker.allreduce.allreduce`, as the release before called it."""

from atoll.diloco.allreduce import ObjectStoreAllReduce

__all__ = ["ObjectStoreAllReduce"]
