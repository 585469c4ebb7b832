"""A training corpus from text: public-domain sentences read out by installable voices."""
