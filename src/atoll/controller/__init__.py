"""The controller: makes the ranks of each training match its spec."""
