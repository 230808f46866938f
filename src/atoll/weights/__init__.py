"""Policy weights through an object store: versions that any number of followers read."""

from atoll.core.errors import Temporary
from atoll.weights.api import Follower, Publisher, ReplicaPublisher, Version
from atoll.weights.machine import Superseded
from atoll.weights.records import Damaged

__all__ = [
    "Damaged",
    "Follower",
    "Publisher",
    "ReplicaPublisher",
    "Superseded",
    "Temporary",
    "Version",
]
