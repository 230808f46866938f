"""The backend of one machine: ranks as processes."""
