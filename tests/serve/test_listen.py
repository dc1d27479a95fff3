"""Addresses that nothing can listen on are refused in one line."""

import pytest

from quire.errors import ConfigError
from quire.serve.config import ServerConfig
from quire.serve.connection import bind


@pytest.mark.parametrize("host", ["x..y", "x\0y", "a" * 300, "\u00e9" * 80, "256.1.1.1"])
def test_a_host_that_has_no_address_is_refused(host):
    with pytest.raises(ConfigError, match=r"cannot listen on .* choose another --host"):
        bind(host, 0)


def test_an_empty_host_does_not_stand_for_all_addresses():
    with pytest.raises(ConfigError, match=r"expected a host address, got an empty string"):
        ServerConfig(host="")
