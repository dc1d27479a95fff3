"""Opens the disk or network tier for cached prefixes of an engine, as configured."""

import contextlib
import hashlib
import os
import secrets
import sys
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch

from quire.config.kv_config import KVConfig, PrefixCacheConfig
from quire.engine.pool import KVPool
from quire.errors import ConfigError, CorruptData, StorageError, TierFull, UnsoundCombination
from quire.kv.block_records import BlockRecords
from quire.kv.prefix import PrefixIndex
from quire.layout.layout import layout_fingerprint, statistics_used
from quire.models.adapter import TransformersDecoder
from quire.models.base import Decoder
from quire.models.loader import LoadedModel
from quire.offload.prefix_store.prefix_tier import PrefixTier
from quire.offload.prefix_store.store import PrefixStore
from quire.offload.tiers.base import Tier
from quire.offload.tiers.disk import DiskTier
from quire.offload.tiers.disk_files import BLOCK_BYTES
from quire.offload.tiers.network import NetworkTier
from quire.plan.fitting import RateEstimator
from quire.scheduler.prefix_sharing import SECRET_BYTES

_FORMAT = "quire prefixes 3"
_CALL_S = 1e-4
_SLOW_BYTES_PER_S = 1e8  # assumed if no measurement succeeded
_PROBE, _PROBE_BYTES = "probe", 2 * BLOCK_BYTES
_TIMEOUT_S, _TRIES = 5.0, 2


@dataclass(frozen=True, slots=True)
class OpenedTier:
    """An open tier and the identity of the blocks that may be read from it.

    Attributes:
        tier: key-value storage of bytes.
        nature: digest of model, precision, codec and layout of readable blocks.
        secret: secret that salts are derived from; None if the prefixes of tenants are not reused
            after the engine ends.
        evicts_when_full: evict least recently used blocks if the tier is full; else the store does.
    """

    tier: Tier
    nature: str
    secret: bytes | None
    evicts_when_full: bool

    def attach(self, index: PrefixIndex) -> PrefixTier:
        """Store the blocks of a prefix index in this tier; on failure the caller closes the tier.

        Raises:
            ConfigError: the tier is smaller than one block, or cannot be reached.
        """
        try:
            byte_s = _seconds_per_byte(self.tier)
            record_bytes = BlockRecords(index.memory, index.block_tokens).record_bytes
            store = PrefixStore(
                self.tier, self.nature, record_bytes, evicts_when_full=self.evicts_when_full
            )
        except StorageError as error:
            raise ConfigError(f"prefixes cannot be stored: {error}") from error
        return PrefixTier(index, store, RateEstimator((_CALL_S, byte_s)))


def open_tier(config: KVConfig, pool: KVPool, model: LoadedModel) -> OpenedTier | None:
    """Open the configured tier; None if no tier is configured.

    Raises:
        ConfigError: conflicting options, a folder that cannot be written or is in use, a full
            disk, or an invalid address.
        UnsoundCombination: prompts share no KV, so there are no prefixes to store.
    """
    options = config.prefix_cache
    disk_bytes = options.disk_memory
    _check(options, pool)
    if not (disk_bytes or options.remote):
        return None
    nature = _nature(pool, model)
    if options.remote:
        host, port = _address(options.remote)
        tier = NetworkTier(host, port, timeout_s=_TIMEOUT_S, tries=_TRIES)
        _require_reachable(tier)
        return OpenedTier(tier, nature, None, evicts_when_full=False)
    folder = Path(options.disk_path).expanduser()
    disk = DiskTier(folder, disk_bytes)
    try:
        secret = _secret(folder / "secret")
    except ConfigError:
        disk.close()
        raise
    return OpenedTier(disk, nature, secret, evicts_when_full=True)


def _check(config: PrefixCacheConfig, pool: KVPool) -> None:
    disk_bytes = config.disk_memory
    if disk_bytes and config.remote:
        raise ConfigError(
            "prefixes are stored on disk or in a remote store, not in both: leave out "
            "--disk-kv-memory or --remote-kv"
        )
    if bool(disk_bytes) != bool(config.disk_path):
        given, missing = "--disk-kv-memory", "--disk-kv-path FOLDER"
        if config.disk_path:
            given, missing = "--disk-kv-path", "--disk-kv-memory SIZE"
        raise ConfigError(f"{given} has no effect alone: give {missing} too")
    if not (disk_bytes or config.remote):
        return
    if not config.enabled:
        raise ConfigError(
            "--disk-kv-memory and --remote-kv store cached prefixes, and the prefix cache is off: "
            "leave out --no-enable-prefix-caching"
        )
    if pool.why_no_prefix is not None:
        raise UnsoundCombination(f"no prefixes to store: {pool.why_no_prefix}")
    if statistics_used(pool.kv.memory.layout, ()):
        raise UnsoundCombination(
            f"codec {pool.codec!r} keeps recent tokens of a sequence outside its pages; they are "
            "not stored with a prefix, so no prefix could be loaded: use a codec such as int8 or "
            "none, or leave out --disk-kv-memory and --remote-kv"
        )


def _address(written: str) -> tuple[str, int]:
    host, colon, port = written.rpartition(":")
    if not (colon and host and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise ConfigError(f"expected --remote-kv HOST:PORT, got {written!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _require_reachable(tier: NetworkTier) -> None:
    try:
        _ = tier.total_bytes
    except StorageError as error:
        tier.close()
        raise ConfigError(
            f"prefixes cannot be stored: {error}; start the store with quire kv-store, or leave "
            "out --remote-kv"
        ) from error


def _nature(pool: KVPool, model: LoadedModel) -> str:
    """Digest of all inputs of stored bytes other than the tokens."""
    if model.folder is not None:
        weights: str | None = fingerprint_folder(model.folder)
    else:
        weights = fingerprint_decoder(model.decoder)
    parts = (
        *(_FORMAT, sys.byteorder, weights or secrets.token_hex()),
        *(pool.stored_as.fingerprint, layout_fingerprint(pool.kv.memory.layout)),
        *(["batch invariant"] if pool.batch_invariant else []),
    )
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()


def _secret(path: Path) -> bytes:
    """Read the secret that tenants' salts are derived from; create it in the tier's folder.

    Raises:
        ConfigError: the file cannot be read or written.
    """
    try:
        with contextlib.suppress(FileNotFoundError):
            found = path.read_bytes()
            if len(found) == SECRET_BYTES:
                return found
        created, partial_path = secrets.token_bytes(SECRET_BYTES), path.with_suffix(".part")
        handle = os.open(partial_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(created)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial_path, path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; name another folder") from error
    return created


def _seconds_per_byte(tier: Tier) -> float:
    """Read speed of a tier, measured with one read; every load refines it.

    Raises:
        StorageError: the tier cannot be reached.
    """
    into = memoryview(bytearray(_PROBE_BYTES))
    blocks = {k: at for k, at in tier.stored().items() if at.num_bytes and k[:5] != _PROBE}
    for key, at in list(blocks.items())[:1]:
        with contextlib.suppress(StorageError, CorruptData):  # another engine may drop the block
            return _read_s(tier, key, into[: at.num_bytes])
    own = f"{_PROBE}-{secrets.token_hex(8)}"  # another engine may measure at the same time
    try:
        tier.write(own, into)
        return _read_s(tier, own, into)
    except (TierFull, CorruptData):
        return 1 / _SLOW_BYTES_PER_S
    finally:
        tier.drop(own)


def _read_s(tier: Tier, key: str, into: memoryview) -> float:
    """Seconds per byte to read the value of a key."""
    started_s = time.perf_counter()
    tier.read(key, into)
    return max(time.perf_counter() - started_s, _CALL_S) / into.nbytes


# ---- fingerprint ---------------------------------------------------------------------------------

# Fingerprint of a model's weights: a model must never load KV that another model stored.
#
# All bytes are hashed: a fine-tuned model may differ from its base model in a few rows only.

_READ_BYTES = 8 << 20


def fingerprint_folder(folder: Path) -> str:
    """Fingerprint of a folder's config and weight files: 0.4 s per GB in the page cache."""
    total = hashlib.blake2b(digest_size=16)
    files = sorted([folder / "config.json", *folder.glob("*.safetensors"), *folder.glob("*.py")])
    for file in files:
        if file.is_file():
            total.update(f"{file.name}\0{file.stat().st_size}\0{_sum(file)}\0".encode())
    return total.hexdigest()


def fingerprint_decoder(decoder: Decoder) -> str | None:
    """Fingerprint of a model without a folder; None if its weights cannot be read."""
    if not isinstance(decoder, TransformersDecoder):
        return None
    total = hashlib.blake2b(digest_size=16)
    total.update(repr(sorted(decoder.model.config.to_dict().items(), key=str)).encode())
    for name, tensor in decoder.model.state_dict().items():
        plain = tensor.detach().contiguous().cpu()
        if plain.is_mkldnn or not plain.numel():
            return None  # packed weights, or an offloaded layer
        bits = zlib.crc32(plain.reshape(-1).view(torch.uint8).numpy().data)
        total.update(f"{name}\0{tuple(tensor.shape)}\0{tensor.dtype}\0{bits}\0".encode())
    return total.hexdigest()


def _sum(file: Path) -> int:
    total = 0
    with open(file, "rb") as opened:
        while data := opened.read(_READ_BYTES):
            total = zlib.crc32(data, total)
    return total
