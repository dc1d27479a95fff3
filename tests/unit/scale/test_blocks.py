"""Hashes of blocks, and KV events in the router's hashes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.block_events import BlockEvents
from quire.errors import ConfigError
from quire.kv.prefix_key import PrefixIdentity, blocks_of
from quire.scale.routing.blocks import EventTranslator, block_hashes

BLOCK = 4
tokens = st.lists(st.integers(0, 3), max_size=14)


def common(first, second):
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
        min(len(first), len(second)),
    )


@given(first=tokens, second=tokens)
def test_equal_hashes_are_equal_prefixes(first, second):
    hashes = [block_hashes(each, BLOCK) for each in (first, second)]

    assert [len(each) for each in hashes] == [len(first) // BLOCK, len(second) // BLOCK]
    assert common(*hashes) == common(first, second) // BLOCK


def test_salts_separate_tenants():
    assert not set(block_hashes(range(8), BLOCK, salt="a")) & set(block_hashes(range(8), BLOCK))


def test_a_block_has_a_token_or_more():
    with pytest.raises(ConfigError, match="block_tokens of 1 or more, got 0"):
        block_hashes([1], 0)


# ---- events ------------------------------------------------------------------------------------


def engine_keys(token_ids, salt):
    identity = PrefixIdentity(b"root", salt)
    return [block.key for block in blocks_of(identity, token_ids, BLOCK)]


class Engine:
    """Emits events as an engine does, with secret salts."""

    def __init__(self):
        batches = []
        self._batches = batches
        self._events = BlockEvents(batches.append, "CPU")

    def stored(self, token_ids, salt, start=0):
        keys = engine_keys(token_ids, salt)
        first = start // BLOCK
        parent = keys[first - 1] if first else None
        self._events.stored(keys[first:], parent, token_ids[start : len(keys) * BLOCK], BLOCK)

    def removed(self, token_ids, salt, start=0):
        self._events.removed(engine_keys(token_ids, salt)[start // BLOCK :])

    def cleared(self):
        self._events.cleared()

    def take(self):
        taken = [event for batch in self._batches for event in batch["events"]]
        self._batches.clear()
        return taken


def held_after(events, translator):
    held = set()
    for event in translator.translate(events):
        if event["type"] == "BlockStored":
            held.update(event["block_hashes"])
        elif event["type"] == "BlockRemoved":
            held.difference_update(event["block_hashes"])
        else:
            held.clear()
    return held


def test_events_of_an_engine_become_hashes_of_tokens():
    engine, translator = Engine(), EventTranslator(BLOCK)
    engine.cleared()
    engine.stored([*range(8)], b"salt")
    engine.stored([*range(16)], b"salt", start=8)
    engine.removed([*range(16)], b"salt", start=12)

    assert held_after(engine.take(), translator) == set(block_hashes(range(12), BLOCK))
    assert len(translator) == 3


def test_tokens_stored_by_two_tenants_stay_until_both_are_removed():
    engine, translator = Engine(), EventTranslator(BLOCK)
    for salt in (b"a", b"b"):
        engine.stored([*range(8)], salt)
    engine.removed([*range(8)], b"a")
    assert held_after(engine.take(), translator) == set(block_hashes(range(8), BLOCK))

    engine.removed([*range(8)], b"b")
    [event] = translator.translate(engine.take())
    assert event["block_hashes"] == list(block_hashes(range(8), BLOCK))
    assert len(translator) == 0


def test_blocks_after_missed_events_are_left_out():
    engine, translator = Engine(), EventTranslator(BLOCK)
    engine.stored([*range(8)], b"a", start=4)

    assert held_after(engine.take(), translator) == set()
    assert translator.num_unknown == 1


def test_cleared_engine_holds_nothing():
    engine, translator = Engine(), EventTranslator(BLOCK)
    engine.stored([*range(8)], b"a")
    engine.cleared()

    assert held_after(engine.take(), translator) == set()
    assert len(translator) == 0


def test_blocks_of_another_size_are_refused():
    engine = Engine()
    engine.stored([*range(8)], b"a")

    with pytest.raises(ConfigError, match="blocks of 16 tokens, got 4"):
        EventTranslator(16).translate(engine.take())
