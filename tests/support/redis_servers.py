"""Redis servers of tests, which are skipped where no program is installed."""

import shutil

import pytest

from benchmarks.common.redis_server import RedisServer, server_program

requires_redis = pytest.mark.skipif(
    server_program() is None, reason="no redis-server or valkey-server is installed"
)


def start_redis(*options: str, **other) -> RedisServer:
    """A server of its own; the test is skipped without a program or the Python package."""
    pytest.importorskip("redis", reason="the package redis is not installed")
    if server_program() is None:
        pytest.skip("no redis-server or valkey-server is installed")
    return RedisServer(options, **other)


def require_openssl() -> str:
    """Path of the program that creates certificates."""
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("openssl is not installed")
    return program
