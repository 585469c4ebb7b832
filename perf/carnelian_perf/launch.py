"""Servers that a measurement starts."""

from pathlib import Path

from carnelian_serving.launcher import Server


def quiet_server(repository: Path) -> Server:
    """A server of a repository on free ports, to be started, which tells of errors alone."""
    return Server(repository, http_port=0, grpc_port=0, metrics_port=0, log_level="error")
