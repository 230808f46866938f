"""Plain torch.distributed, as for torchrun: atoll sets the same variables.

atoll run -n 4 -- python examples/torch_distributed.py
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
value = torch.tensor([float(rank)])
dist.all_reduce(value)
expected = world * (world - 1) / 2
print(f"rank {rank} of {world}: the sum of all ranks is {value.item():g}", flush=True)
assert value.item() == expected, f"expected {expected}"
dist.destroy_process_group()
