"""Keys of cached prefixes: a chain of hashes over tokens, salt and everything else KV depends on.

    root       = hash(fingerprint)                      model, codec, policy, RoPE scaling variant
    block i    = hash(block i - 1, salt, tokens of i)   salt: empty in the public part, then private

The public part of a prompt (a system prompt that the operator has registered) is shared by all
tenants. From the first block that is not wholly public, keys are salted, so a tenant cannot learn
another tenant's prompts from response times. Keys are 16 bytes; equal keys are verified by
comparing tokens.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

KEY_BYTES = 16
SALT_BYTES = 16


@dataclass(frozen=True, slots=True)
class PrefixIdentity:
    """The identity that two requests must have in common to share a prefix."""

    root: bytes  # key before the first block
    salt: bytes = b""  # of the private part; empty if callers are not separated
    public_tokens: int = 0  # leading tokens that all tenants share
    owner: str = field(default="", compare=False)  # tenant, for reports; not part of the identity


def root_key(*made_by: str) -> bytes:
    """The key before the first block: all that KV depends on besides the preceding tokens."""
    return hashlib.blake2b("\0".join(made_by).encode(), digest_size=KEY_BYTES).digest()


def private_salt(secret: bytes, tenant: str, cache_salt: str) -> bytes:
    """Return a salt that callers cannot choose: only the engine knows the secret."""
    name = f"{tenant}\0{cache_salt}".encode()
    return hashlib.blake2b(name, key=secret, digest_size=SALT_BYTES).digest()


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a prompt: whole pages of tokens."""

    key: bytes  # of the chain up to the block's end
    tokens: bytes  # ids as int64 bytes
    end: int  # position after the block's last token

    @property
    def token_ids(self) -> list[int]:
        return memoryview(self.tokens).cast("q").tolist()


def blocks_of(
    identity: PrefixIdentity,
    token_ids: Sequence[int],
    block_tokens: int,
    *,
    start: int = 0,
    parent_key: bytes | None = None,
) -> Iterator[Block]:
    """Yield the whole blocks of the tokens from `start`, a multiple of `block_tokens`, in order."""
    key = identity.root if parent_key is None else parent_key
    for first in range(0, len(token_ids) - block_tokens + 1, block_tokens):
        # lazy: a lookup stops at the first missing block and hashes no further
        end = start + first + block_tokens
        block = _block(identity, key, token_ids[first : first + block_tokens], end)
        yield block
        key = block.key


class BlockChain:
    """The whole blocks of one sequence; each is hashed once, so tokens must not change."""

    def __init__(
        self,
        identity: PrefixIdentity,
        block_tokens: int,
        read: Callable[[int, int], Sequence[int]],
    ) -> None:
        self.identity = identity
        self._block_tokens, self._read = block_tokens, read
        self._known: list[Block] = []

    def blocks(self, num_tokens: int) -> Iterator[Block]:
        for number in range(num_tokens // self._block_tokens):
            if number == len(self._known):
                self._known.append(self._next())
            yield self._known[number]

    def _next(self) -> Block:
        first = len(self._known) * self._block_tokens
        end = first + self._block_tokens
        key = self._known[-1].key if self._known else self.identity.root
        return _block(self.identity, key, self._read(first, end), end)


def _block(
    identity: PrefixIdentity, parent_key: bytes, token_ids: Sequence[int], end: int
) -> Block:
    tokens = np.array(token_ids, dtype=np.int64).tobytes()
    salt = b"" if end <= identity.public_tokens else identity.salt
    key = hashlib.blake2b(parent_key + salt + tokens, digest_size=KEY_BYTES).digest()
    return Block(key, tokens, end)
