"""DiLoCo where people already train: a callback for each trainer.

`transformers.DiLoCoCallback` (Trainer, and TRL's trainers) and `lightning.DiLoCoCallback`. Both
import without their package, and say what to install when they are used.
"""
