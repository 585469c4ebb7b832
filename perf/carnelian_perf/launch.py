"""Servers that a measurement starts."""

from pathlib import Path

from carnelian_serving.launcher import Server


def quiet_server(repository: Path) -> Server:
    """Make a server of a repository, not yet started, that will use free ports and log errors only."""
    return Server(repository, http_port=0, grpc_port=0, metrics_port=0, log_level="error")
