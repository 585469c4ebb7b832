"""A server on this machine: its settings, its cost, its memory."""
