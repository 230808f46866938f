"""atoll where people already train: a module for each framework.

`transformers.DiLoCoCallback` (Trainer, and TRL's trainers), `lightning.DiLoCoCallback`, the manager
of `torchft`, and weights for `trl`, `vllm` and `verl`. They import without their package, and say
what to install when they are used.
"""
