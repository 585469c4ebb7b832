"""Measurements of a running Carnelian server."""
