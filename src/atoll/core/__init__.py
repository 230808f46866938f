"""What a training is. Pure: no I/O, no clock, no threads, no asyncio."""
