"""Language models: their texts, training, perplexity, and weights in decoding."""
