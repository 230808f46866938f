from atoll.diloco.torchft_manager import ObjectStoreManager

__all__ = ["ObjectStoreManager"]
