"""Measurements of a Carnelian server."""
