"""A server on this machine: its settings, its cost, its first requests, its memory."""
