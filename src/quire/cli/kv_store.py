"""`quire kv-store`: a network store for cached prefixes of several engines."""

import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quire.errors import ConfigError
from quire.layout.options import parse_named
from quire.layout.sizes import format_size, parse_size

if TYPE_CHECKING:
    from quire.offload.tiers.base import Tier

LEAST_BYTES = 1 << 20


def kv_store(
    *,
    memory: Annotated[
        str,
        typer.Option(help="Capacity, such as 64GiB; least recently used blocks are evicted."),
    ],
    path: Annotated[
        Path | None,
        typer.Option(help="Folder on disk, used by this store only. Default: CPU memory."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to bind.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port to bind; 0 selects a free port.", min=0, max=65535)
    ] = 8700,
) -> None:
    """Store cached prefixes for engines that run with --remote-kv HOST:PORT.

    There is no authentication: every client that reaches the port can read and write all blocks,
    including prompts. Run the store in a trusted network only.
    """
    # imported here: not needed for --help
    from quire.offload.tiers.lru import LRUTier
    from quire.offload.tiers.server import StoreServer

    if not host.strip():
        raise ConfigError(
            "expected --host with an address such as 127.0.0.1, got an empty string; use 0.0.0.0 "
            "for every address of this machine"
        )
    total_bytes = parse_named(parse_size, "memory", memory)
    if total_bytes < LEAST_BYTES:
        raise ConfigError(
            f"expected --memory of {format_size(LEAST_BYTES)} or more, got {memory!r}, which is "
            f"{format_size(total_bytes)}; give a size with its unit, such as 64GiB"
        )
    tier = _tier(path, total_bytes)
    server = StoreServer(LRUTier(tier), host, port)
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    address, size = f"{server.address[0]}:{server.address[1]}", format_size(tier.total_bytes)
    location = "CPU memory" if path is None else str(path)
    typer.echo(f"Storing up to {size} of prefixes in {location}, listening on {address}")
    ended.wait()
    server.close()
    tier.close()


def _tier(path: Path | None, total_bytes: int) -> "Tier":
    if path is not None:
        from quire.offload.tiers.disk import DiskTier

        return DiskTier(path, total_bytes)
    from quire.offload.tiers.host import HostTier  # imports torch

    return HostTier(total_bytes)
