"""The errors of a server."""


class ServerError(RuntimeError):
    """The server could not be started, or ended by itself; the message says why."""
