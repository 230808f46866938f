"""The mesh gate, at which ranks wait, and the fabric of agents that decides when it opens."""
