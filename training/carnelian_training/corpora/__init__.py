"""Corpora for training: fetched, converted, looked through, multiplied."""
