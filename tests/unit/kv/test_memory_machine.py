"""The state machine of the KV memory; see `support.memory_machine`."""

from quire.kv.memory import KVMemory
from support.memory_machine import LAYOUT, MAX_ROWS, MemoryMachine


def test_layout_has_page_sizes_that_do_not_divide_a_slab():
    memory = KVMemory(LAYOUT, 24 * 1024, MAX_ROWS)

    assert [c.page_bytes for c in LAYOUT.page_classes] == [64, 192, 192, 192, 448, 128, 128, 64, 64]
    assert memory.arena.slab_bytes % 192
    assert {c.tokens for c in LAYOUT.page_classes} == {1, 2, 3, 4, 8}


TestMemoryMachine = MemoryMachine.TestCase
