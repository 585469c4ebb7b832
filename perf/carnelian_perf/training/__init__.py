"""Measurements of training: its steps, the loading of data, and what an Hourglass saves."""
