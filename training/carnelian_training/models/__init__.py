"""Networks and their configurations: recognisers, wav2vec 2.0 for pre-training, and a language model."""
