"""The endpoints of the native API, a module for each noun."""
