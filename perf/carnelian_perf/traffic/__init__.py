"""Clips of mixed length: how batches form from them, and how many a second are answered in time."""
