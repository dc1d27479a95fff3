"""Hashes of blocks of tokens, for routers that see the tokens of prompts."""

import hashlib
from collections.abc import Sequence

import numpy as np

from quire.errors import ConfigError

HASH_BYTES = 16


def block_hashes(token_ids: Sequence[int], block_tokens: int, salt: str = "") -> tuple[bytes, ...]:
    """Hashes of the whole blocks of a prompt; each covers the block and everything before it.

    Args:
        token_ids: tokens of the prompt.
        block_tokens: tokens of a block; the block size of the engines.
        salt: separates prompts that cannot share KV, such as those of different tenants.
    """
    if block_tokens < 1:
        raise ConfigError(f"expected block_tokens of 1 or more, got {block_tokens}")
    tokens = np.asarray(token_ids, dtype=np.int64)
    found = [hashlib.blake2b(salt.encode(), digest_size=HASH_BYTES).digest()]
    for first in range(0, len(tokens) - block_tokens + 1, block_tokens):
        block = found[-1] + tokens[first : first + block_tokens].tobytes()
        found.append(hashlib.blake2b(block, digest_size=HASH_BYTES).digest())
    return tuple(found[1:])
