"""Invalid listen addresses are refused with one line."""

import resource
import socket

import pytest

from quire.errors import ConfigError
from quire.layout.values import raise_file_limit
from quire.serve.config import ServerConfig
from quire.serve.connection import bind


def test_port_in_use_is_refused_by_number():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        with pytest.raises(ConfigError, match=f"127.0.0.1 port {port}.*--port"):
            bind("127.0.0.1", port)


@pytest.mark.parametrize("host", ["x..y", "x\0y", "a" * 300, "\u00e9" * 80, "256.1.1.1"])
def test_invalid_host_is_refused(host):
    with pytest.raises(ConfigError, match=r"cannot listen on .* choose another --host"):
        bind(host, 0)


def test_empty_host_is_refused():
    with pytest.raises(ConfigError, match=r"expected a host address, got an empty string"):
        ServerConfig(host="")


def test_limit_of_open_files_is_raised_to_the_hard_limit():
    before = soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 100, hard))
    try:
        raise_file_limit()

        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(hard, 65_536), hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
