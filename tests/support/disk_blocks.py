"""Locations of entries in the files of a disk tier."""

from pathlib import Path

from quire.offload.tiers.disk_files import Journal


def disk_blocks(folder: Path, key: str) -> list[int]:
    """Return the block numbers of an entry, from the newest line of the index that names it."""
    [*_, line] = [line for line in Journal(folder / "index").lines() if line.get("key") == key]
    return [n for start, count in line["extents"] for n in range(start, start + count)]
