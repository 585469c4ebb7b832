"""Training and evaluation data: read, check, augment and batch the clips of a manifest."""
