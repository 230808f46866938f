from atoll.diloco.loop import DiLoCo, RoundReport

__all__ = ["DiLoCo", "RoundReport"]
