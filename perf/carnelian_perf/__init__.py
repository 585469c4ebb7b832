"""Measurements of a Carnelian server, of inference without one, and of training."""
