"""Networks and their configurations: recognisers, wav2vec 2.0 in pre-training, a language model."""
