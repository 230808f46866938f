"""`atoll.worker.torchft_manager`, as the release before called it."""

from atoll.diloco.torchft_manager import ObjectStoreManager

__all__ = ["ObjectStoreManager"]
