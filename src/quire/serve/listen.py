"""The server's socket: bound before the model is loaded, so that a taken port is told at once."""

import os
import socket

from quire.errors import ConfigError


def bind(host: str, port: int) -> socket.socket:
    """A socket that has its address and does not accept connections yet.

    Args:
        host: address to listen on.
        port: port to listen on; 0 takes a free one.

    Raises:
        ConfigError: nothing can listen there.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name == "posix":  # elsewhere it lets two processes have one port
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind((host, port))
    except (OSError, TypeError, UnicodeError) as error:  # the latter: no host has such a name
        bound.close()
        raise _cannot_listen(host, port, error) from error
    return bound


def listen(bound: socket.socket) -> str:
    """Accept connections from now on; the URL of the API.

    Raises:
        ConfigError: another process listens there since the socket was bound.
    """
    host, port = bound.getsockname()[:2]
    try:
        bound.listen()
    except OSError as error:
        raise _cannot_listen(host, port, error) from error
    return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"


def _cannot_listen(host: str, port: int, error: Exception) -> ConfigError:
    reason = getattr(error, "strerror", None) or error
    return ConfigError(
        f"cannot listen on {host} port {port}: {reason}; choose another --host or --port (0 takes "
        "a free port)"
    )
