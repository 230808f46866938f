from atoll.mesh.gate import mesh_status, mesh_wait

__all__ = ["mesh_status", "mesh_wait"]
