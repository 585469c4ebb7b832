"""The `dali` backend."""
