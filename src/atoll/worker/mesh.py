"""`atoll.worker.mesh`, as the release before called it."""

from atoll.mesh.gate import mesh_status, mesh_wait

__all__ = ["mesh_status", "mesh_wait"]
