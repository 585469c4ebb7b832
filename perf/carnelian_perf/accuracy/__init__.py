"""Measurements of accuracy: of a running server, decoders, language models, words and int8."""
