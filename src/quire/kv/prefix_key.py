"""What a cached prefix is known by: a chain of hashes over its tokens, its salt and its making.

    root       = hash(fingerprint)                      model, codec, policy, rotary regime
    block i    = hash(block i - 1, salt, tokens of i)   salt: none in the public part, then private

The public part of a prompt (a system prompt that the operator has registered) is shared by all;
from the first block that is not wholly public, keys are salted, so that no tenant can learn by
timing what another has asked. Keys are 16 bytes; where they are equal, tokens are compared too.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

KEY_BYTES = 16
SALT_BYTES = 16


@dataclass(frozen=True, slots=True)
class PrefixIdentity:
    """Who may share a prefix.

    Attributes:
        root: what every key of a chain begins with; see `root_key`.
        salt: of the private part; empty where nothing separates callers.
        public_tokens: the first so many tokens are shared by all.
    """

    root: bytes
    salt: bytes = b""
    public_tokens: int = 0


def root_key(*made_by: str) -> bytes:
    """The key before the first block.

    Args:
        made_by: all that KV depends on besides the tokens before it.
    """
    return hashlib.blake2b("\0".join(made_by).encode(), digest_size=KEY_BYTES).digest()


def private_salt(secret: bytes, tenant: str, cache_salt: str) -> bytes:
    """A salt that callers cannot choose: only the engine knows the secret.

    Args:
        secret: of the engine, up to 64 bytes.
        tenant: on whose account the request runs.
        cache_salt: what its caller adds, to separate its own users.
    """
    name = f"{tenant}\0{cache_salt}".encode()
    return hashlib.blake2b(name, key=secret, digest_size=SALT_BYTES).digest()


@dataclass(frozen=True, slots=True)
class Block:
    """A page-aligned piece of a prompt.

    Attributes:
        key: of the chain up to its end.
        tokens: its token ids, int64 bytes.
        end: position behind it.
    """

    key: bytes
    tokens: bytes
    end: int

    @property
    def token_ids(self) -> list[int]:
        """Its tokens as numbers."""
        return memoryview(self.tokens).cast("q").tolist()


def blocks_of(
    identity: PrefixIdentity,
    token_ids: Sequence[int],
    block_tokens: int,
    *,
    start: int = 0,
    parent_key: bytes | None = None,
) -> Iterator[Block]:
    """The whole blocks of some tokens, in order.

    Args:
        identity: root and salts.
        token_ids: from position `start` on; the rest that fills no block is left out.
        block_tokens: tokens of a block.
        start: position of the first token, at a block's border.
        parent_key: of the block before it; None at position 0.
    """
    key = identity.root if parent_key is None else parent_key
    for first in range(0, len(token_ids) - block_tokens + 1, block_tokens):
        # block by block: who finds the first one missing looks no further
        end = start + first + block_tokens
        block = _block(identity, key, token_ids[first : first + block_tokens], end)
        yield block
        key = block.key


class BlockChain:
    """The whole blocks of one sequence, each hashed once, when somebody first looks so far.

    Args:
        identity: root and salts.
        block_tokens: tokens of a block.
        read: tokens by position (start, end); those that were read once must not change.
    """

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
        """The whole blocks of the first so many tokens, in order."""
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
