"""Word and character error rates, offline and through a server; transcripts as labels."""
