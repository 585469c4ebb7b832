"""The training run: what a step learns from and how, what it keeps, and what it tells."""
