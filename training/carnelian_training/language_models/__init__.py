"""Language models: the text they are made of, their training, their perplexity, their weights in decoding."""
