"""Fingerprint of stored KV: a model must never load KV that another model or layout stored."""

import hashlib
import secrets
import sys
import zlib
from pathlib import Path

import torch

from quire.engine.pool import KVPool
from quire.layout.layout import layout_fingerprint
from quire.models.adapter import TransformersDecoder
from quire.models.base import Decoder
from quire.models.loader import LoadedModel

_FORMAT = "quire prefixes 4"
_READ_BYTES = 8 << 20


def kv_fingerprint(pool: KVPool, model: LoadedModel) -> str:
    """Digest of all that stored KV depends on other than the tokens.

    These are the weights, precision, codec, layout and byte order, and the format of records.
    """
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
