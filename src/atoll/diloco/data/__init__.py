"""Which replica trains on which data: leases that the rounds themselves commit."""
