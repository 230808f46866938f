"""The executor for one machine: ranks are processes."""
