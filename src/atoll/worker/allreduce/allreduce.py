from atoll.diloco.allreduce import ObjectStoreAllReduce

__all__ = ["ObjectStoreAllReduce"]
