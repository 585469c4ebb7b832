"""Training: steps, loading, Hourglass."""
