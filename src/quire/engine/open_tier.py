"""Opens the tiers for cached prefixes of an engine, as configured: CPU memory, disk, remote."""

import contextlib
import hashlib
import logging
import os
import secrets
import sys
import time
import zlib
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from quire.config.kv_config import KVConfig, PrefixCacheConfig
from quire.engine.pool import KVPool
from quire.errors import (
    ConfigError,
    CorruptData,
    OffloadError,
    StorageError,
    TierFull,
    TierUnreachable,
)
from quire.kv.block_records import BlockRecords
from quire.kv.prefix import PrefixIndex
from quire.layout.layout import layout_fingerprint
from quire.models.adapter import TransformersDecoder
from quire.models.base import Decoder
from quire.models.loader import LoadedModel
from quire.offload.prefix_store.levels import PrefixLevels
from quire.offload.prefix_store.prefix_tier import PrefixTier
from quire.offload.prefix_store.store import CPU, DISK, REMOTE, PrefixStore, TierKind
from quire.offload.tiers.base import LateTier, Tier
from quire.offload.tiers.file import FileTier
from quire.offload.tiers.host import HostTier
from quire.offload.tiers.redis_tier import RedisOptions, RedisTier
from quire.plan.fitting import RateEstimator

_FORMAT = "quire prefixes 4"
_READ_BYTES = 8 << 20


def kv_fingerprint(pool: KVPool, model: LoadedModel) -> str:
    """Digest of all that stored KV depends on other than the tokens.

    These are the weights, precision, codec, layout and byte order, and the format of records.
    """
    parts = (
        *(_FORMAT, sys.byteorder, _weights_fingerprint(model)),
        *([] if model.draft is None else [_weights_fingerprint(model.draft)]),
        *(pool.stored_as.fingerprint, layout_fingerprint(pool.kv.memory.layout)),
        *(["batch invariant"] if pool.batch_invariant else []),
    )
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()


def _weights_fingerprint(model: LoadedModel) -> str:
    if model.folder is not None:
        return fingerprint_folder(model.folder)
    return fingerprint_decoder(model.decoder) or secrets.token_hex()


# All bytes are hashed: a fine-tuned model may differ from its base model in a few rows only.


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


_CALL_S = 1e-4
_SLOW_BYTES_PER_S = 1e8  # assumed if no measurement succeeded
_PROBE, _PROBE_BYTES = "probe", 2 << 20
USERNAME, PASSWORD = "QUIRE_REMOTE_KV_USERNAME", "QUIRE_REMOTE_KV_PASSWORD"
"""Environment variables with the login of the shared store; they replace that of its URL."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OpenedTiers:
    """Open tiers, fastest first, and the identity of the blocks that may be read from them."""

    tiers: tuple[tuple[TierKind, Tier], ...]  # fastest first
    nature: str  # digest of model, precision, codec and layout of readable blocks
    # salts derive from it; None if tenants' prefixes are not reused after the engine ends
    secret: bytes | None
    write_through: bool = False  # whether blocks are written as soon as they are computed
    is_required: bool = False  # whether a tier that cannot be used is refused

    def attach(self, index: PrefixIndex) -> PrefixTier:
        """Store the blocks of a prefix index in the tiers; on failure the caller closes them."""
        record_bytes = BlockRecords(index.memory, index.block_tokens).record_bytes
        stores: list[PrefixStore] = []
        rates: list[RateEstimator] = []
        for level in range(len(self.tiers) - 1, -1, -1):
            store = self._store(level, record_bytes, stores[0] if stores else None)
            stores.insert(0, store)
            rates.insert(0, RateEstimator((_CALL_S, self._seconds_per_byte(level, store))))
        levels = PrefixLevels(stores, rates)
        return PrefixTier(index, levels, write_through=self.write_through)

    def _seconds_per_byte(self, level: int, store: PrefixStore) -> float:
        """Read speed of a tier; an assumed one if it cannot be used."""
        breaker = store.breaker
        if not breaker.num_outages:
            try:
                return _seconds_per_byte(self.tiers[level][1])
            except OffloadError as error:
                breaker.failed(error)
        if self.is_required:
            raise _refusal(breaker.reason)
        return 1 / _SLOW_BYTES_PER_S

    def _store(self, level: int, record_bytes: int, below: PrefixStore | None) -> PrefixStore:
        kind, tier = self.tiers[level]
        return PrefixStore(tier, self.nature, record_bytes, kind=kind, level=level, below=below)

    def close(self) -> None:
        for _, tier in self.tiers:
            tier.close()


def open_tiers(config: KVConfig, pool: KVPool, model: LoadedModel) -> OpenedTiers | None:
    """Open the configured tiers; None if no tier is configured."""
    options = config.prefix_cache
    _check(options)
    if not _has_tier(options):
        return None
    nature = kv_fingerprint(pool, model)
    with ExitStack() as undo:
        tiers: list[tuple[TierKind, Tier]] = []
        for kind, opens in ((CPU, _open_cpu), (DISK, _open_disk), (REMOTE, _open_remote)):
            tier = opens(options, nature)
            if tier is not None:
                tiers.append((kind, tier))
                undo.callback(tier.close)
        secret = _usable_secret(options, tiers[-1][1])
        undo.pop_all()
    return OpenedTiers(
        tuple(tiers),
        nature,
        secret,
        write_through=options.write == "through",
        is_required=options.require_tiers,
    )


def _refusal(reason: object) -> ConfigError:
    return ConfigError(
        f"prefixes cannot be stored: {reason}; mend the folder or the store, check the login "
        f"({USERNAME}, {PASSWORD}), or start without --require-tiers"
    )


def _has_tier(options: PrefixCacheConfig) -> bool:
    return bool(options.cpu_memory or options.disk_memory or options.remote)


def _open_cpu(options: PrefixCacheConfig, _: str) -> Tier | None:
    memory = options.cpu_memory
    return HostTier(memory) if memory else None


def _open_disk(options: PrefixCacheConfig, _: str) -> Tier | None:
    memory, folder = options.disk_memory, Path(options.disk_path).expanduser()
    return LateTier(lambda: FileTier(folder, memory), memory) if memory else None


def _open_remote(options: PrefixCacheConfig, nature: str) -> Tier | None:
    url = options.remote
    if url is None:
        return None
    if url.scheme == "file":
        folder, memory = Path(url.path), options.remote_memory
        return LateTier(lambda: FileTier(folder, memory, flag="--remote-kv-memory"), memory)
    limits = RedisOptions(
        max_bytes=options.remote_memory,
        ttl_s=options.remote_ttl_s,
        timeout_s=options.remote_timeout_s,
        username=os.environ.get(USERNAME),
        password=os.environ.get(PASSWORD),
    )
    return RedisTier(url, nature, limits)


def _check(config: PrefixCacheConfig) -> None:
    if bool(config.disk_memory) != bool(config.disk_path):
        given, missing = "--disk-kv-memory", "--disk-kv-path FOLDER"
        if config.disk_path:
            given, missing = "--disk-kv-path", "--disk-kv-memory SIZE"
        raise ConfigError(f"{given} has no effect alone: give {missing} too")
    if config.remote_memory and config.remote is None:
        raise ConfigError("--remote-kv-memory has no effect alone: give --remote-kv URL too")
    if config.remote is not None and config.remote.scheme == "file" and not config.remote_memory:
        raise ConfigError(
            f"expected a size for the folder {config.remote}, got none: give --remote-kv-memory "
            "SIZE too"
        )
    if not _has_tier(config):
        for flag, value, default in (
            ("--kv-write", config.write, "back"),
            ("--kv-load", config.load, "fastest"),
            ("--require-tiers", config.require_tiers, False),
        ):
            if value != default:
                given = flag if value is True else f"{flag} {value}"
                raise ConfigError(
                    f"{given} has no effect without a tier: give --remote-kv URL, or "
                    "--disk-kv-memory SIZE with --disk-kv-path FOLDER"
                )
        return
    if not config.enabled:
        raise ConfigError(
            "--cpu-kv-memory, --disk-kv-memory and --remote-kv store cached prefixes, and the "
            "prefix cache is off: leave out --no-enable-prefix-caching"
        )


def _usable_secret(options: PrefixCacheConfig, slowest: Tier) -> bytes | None:
    """The secret that tenants' salts derive from; None if it cannot be read or written."""
    try:
        return slowest.secret()
    except StorageError as error:
        if options.require_tiers:
            raise _refusal(error) from error
        if not isinstance(error, TierUnreachable):  # the tier itself is reported later
            logger.warning("prefixes of tenants are not found by other engines: %s", error)
        return None


def _seconds_per_byte(tier: Tier) -> float:
    """Read speed of a tier, measured with one read; every load refines it."""
    into = memoryview(bytearray(_PROBE_BYTES))
    own = f"{_PROBE}-{secrets.token_hex(8)}"  # another engine may measure at the same time
    try:
        tier.write(own, into)
        return _read_s(tier, own, into)
    except (TierFull, CorruptData):
        for key, stored in tier.stored().items():
            if stored.num_bytes:
                with contextlib.suppress(StorageError, CorruptData):  # dropped by another engine
                    return _read_s(tier, key, into[: stored.num_bytes])
        return 1 / _SLOW_BYTES_PER_S
    finally:
        tier.drop(own)


def _read_s(tier: Tier, key: str, into: memoryview) -> float:
    """Seconds per byte to read the value of a key."""
    started_s = time.perf_counter()
    tier.read(key, into)
    return max(time.perf_counter() - started_s, _CALL_S) / into.nbytes
