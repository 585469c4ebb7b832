"""Training corpora: fetch, convert, validate and perturb them."""
