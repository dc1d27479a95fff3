"""Opens the tiers for cached prefixes of an engine, as configured: CPU memory, disk, remote."""

import contextlib
import hashlib
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
from quire.errors import ConfigError, CorruptData, StorageError, TierFull, UnsoundCombination
from quire.kv.block_records import BlockRecords
from quire.kv.prefix import PrefixIndex
from quire.layout.layout import layout_fingerprint
from quire.models.adapter import TransformersDecoder
from quire.models.base import Decoder
from quire.models.loader import LoadedModel
from quire.offload.prefix_store.levels import PrefixLevels
from quire.offload.prefix_store.prefix_tier import PrefixTier
from quire.offload.prefix_store.store import PrefixStore
from quire.offload.prefix_store.tier_kinds import CPU, DISK, REMOTE, TierKind
from quire.offload.tiers.base import Tier
from quire.offload.tiers.disk import DiskTier
from quire.offload.tiers.disk_files import BLOCK_BYTES
from quire.offload.tiers.host import HostTier
from quire.offload.tiers.network import NetworkTier
from quire.plan.fitting import RateEstimator
from quire.scheduler.prefix_sharing import SECRET_BYTES

_FORMAT = "quire prefixes 3"
_CALL_S = 1e-4
_SLOW_BYTES_PER_S = 1e8  # assumed if no measurement succeeded
_PROBE, _PROBE_BYTES = "probe", 2 * BLOCK_BYTES
_TIMEOUT_S, _TRIES = 5.0, 2


@dataclass(frozen=True, slots=True)
class OpenedTiers:
    """Open tiers, fastest first, and the identity of the blocks that may be read from them.

    Attributes:
        tiers: at least one tier, with its kind.
        nature: digest of model, precision, codec and layout of readable blocks.
        secret: secret that salts are derived from; None if the prefixes of tenants are not reused
            after the engine ends.
    """

    tiers: tuple[tuple[TierKind, Tier], ...]
    nature: str
    secret: bytes | None

    def attach(self, index: PrefixIndex) -> PrefixTier:
        """Store the blocks of a prefix index in the tiers; on failure the caller closes them.

        Raises:
            ConfigError: a tier is smaller than one block, or cannot be reached.
        """
        record_bytes = BlockRecords(index.memory, index.block_tokens).record_bytes
        stores: list[PrefixStore] = []
        try:
            rates = [RateEstimator((_CALL_S, _seconds_per_byte(tier))) for _, tier in self.tiers]
            for level in range(len(self.tiers) - 1, -1, -1):
                stores.insert(0, self._store(level, record_bytes, stores[0] if stores else None))
        except StorageError as error:
            raise ConfigError(f"prefixes cannot be stored: {error}") from error
        return PrefixTier(index, PrefixLevels(stores, rates))

    def _store(self, level: int, record_bytes: int, below: PrefixStore | None) -> PrefixStore:
        kind, tier = self.tiers[level]
        return PrefixStore(tier, self.nature, record_bytes, kind=kind, level=level, below=below)

    def close(self) -> None:
        """Close the tiers."""
        for _, tier in self.tiers:
            tier.close()


def open_tiers(config: KVConfig, pool: KVPool, model: LoadedModel) -> OpenedTiers | None:
    """Open the configured tiers; None if no tier is configured.

    Raises:
        ConfigError: conflicting options, a folder that cannot be written or is in use, a full
            disk, or an invalid address.
        UnsoundCombination: prompts share no KV, so there are no prefixes to store.
    """
    options = config.prefix_cache
    _check(options, pool)
    if not _has_tier(options):
        return None
    nature, secret = _nature(pool, model), None
    with ExitStack() as undo:
        tiers: list[tuple[TierKind, Tier]] = []
        for kind, opens in ((CPU, _open_cpu), (DISK, _open_disk), (REMOTE, _open_remote)):
            tier = opens(options)
            if tier is not None:
                tiers.append((kind, tier))
                undo.callback(tier.close)
        if options.disk_memory:
            secret = _secret(Path(options.disk_path).expanduser() / "secret")
        undo.pop_all()
    return OpenedTiers(tuple(tiers), nature, secret)


def _has_tier(options: PrefixCacheConfig) -> bool:
    return bool(options.cpu_memory or options.disk_memory or options.remote)


def _open_cpu(options: PrefixCacheConfig) -> Tier | None:
    memory = options.cpu_memory
    return HostTier(memory, flag="--cpu-kv-memory") if memory else None


def _open_disk(options: PrefixCacheConfig) -> Tier | None:
    memory = options.disk_memory
    return DiskTier(Path(options.disk_path).expanduser(), memory) if memory else None


def _open_remote(options: PrefixCacheConfig) -> Tier | None:
    if not options.remote:
        return None
    host, port = _address(options.remote)
    tier = NetworkTier(host, port, timeout_s=_TIMEOUT_S, tries=_TRIES)
    _require_reachable(tier)
    return tier


def _check(config: PrefixCacheConfig, pool: KVPool) -> None:
    if bool(config.disk_memory) != bool(config.disk_path):
        given, missing = "--disk-kv-memory", "--disk-kv-path FOLDER"
        if config.disk_path:
            given, missing = "--disk-kv-path", "--disk-kv-memory SIZE"
        raise ConfigError(f"{given} has no effect alone: give {missing} too")
    if not _has_tier(config):
        return
    if not config.enabled:
        raise ConfigError(
            "--cpu-kv-memory, --disk-kv-memory and --remote-kv store cached prefixes, and the "
            "prefix cache is off: leave out --no-enable-prefix-caching"
        )
    if pool.why_no_prefix is not None:
        raise UnsoundCombination(f"no prefixes to store: {pool.why_no_prefix}")


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
