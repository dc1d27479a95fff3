"""A listener of prefix indexes, and rows that are prefilled and published in one."""

from quire.kv.prefix import PrefixIdentity, root_key
from support.small_memory import grow, keys, write_lane

DEFAULT_IDENTITY = PrefixIdentity(root_key("a model"))
TOKENS = list(range(50, 70))


class Listener:
    """Records the tokens of all cached blocks by key."""

    def __init__(self):
        self.known = {}

    def stored(self, block_hashes, parent_hash, token_ids, page_tokens):
        assert len(token_ids) == len(block_hashes) * page_tokens
        assert parent_hash is None or parent_hash in self.known
        for number, key in enumerate(block_hashes):
            assert key not in self.known
            self.known[key] = token_ids[number * page_tokens : (number + 1) * page_tokens]

    def removed(self, block_hashes):
        for key in block_hashes:
            del self.known[key]


def prefill(index, tokens, identity=DEFAULT_IDENTITY):
    """Start a row from its cached prefix, prefill the rest, publish; return row and lease."""
    memory = index.memory
    lease = index.match(identity, tokens)
    found = lease.tokens
    row = index.start(lease) if found else memory.start()
    grow(memory, row, len(tokens) - found)
    for name in ("kv", "window"):
        if name in memory.tables and found < len(tokens):
            write_new(memory, row, name, found)
    index.publish(lease, row, tokens[lease.tokens :])
    index.confirm()
    return row, lease


def write_new(memory, row, name, found):
    """Write only the tokens after the cached prefix: shared pages are read-only."""
    before = keys(memory, row, name=name)
    write_lane(memory, row, 0, name=name)
    if name == "kv":
        assert keys(memory, row, name=name)[:found] == before[:found]
