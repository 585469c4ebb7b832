"""What a recogniser gets right: a running server, decoders, language models, words, int8."""
