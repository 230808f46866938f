"""The mesh gate and the fabric that it waits for."""
