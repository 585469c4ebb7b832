"""Clips, from a manifest's line to a batch of features: reading, checking, augmenting, batching."""
