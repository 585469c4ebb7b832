"""gRPC client for Carnelian speech recognition."""
