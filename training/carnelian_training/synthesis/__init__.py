"""Synthetic training corpora: public-domain sentences spoken by installable voices; and synthetic noises and rooms."""
