"""Evaluation by word and character error rates, offline and through a server; and pseudo-labels."""
