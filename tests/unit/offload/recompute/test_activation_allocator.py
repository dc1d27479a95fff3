"""Blocks of the activation allocator: each is free or belongs to one sequence."""

from hypothesis import given, settings
from hypothesis import strategies as st

from quire.offload.recompute.activation_allocator import ActivationAllocator

PAGE, BLOCK = 4, 8


@settings(max_examples=60)
@given(
    actions=st.lists(
        st.tuples(
            st.sampled_from(["note", "note", "note", "cut", "forget"]),
            st.integers(0, 2),
            st.integers(1, 13),
        ),
        max_size=30,
    ),
    until=st.integers(0, 60),
)
def test_known_inputs_are_at_their_recorded_slots(actions, until):
    """Compared with a record of the location of every slot."""
    allocator, length, places = ActivationAllocator(7, BLOCK, PAGE), {}, {}
    for kind, row, number in actions:
        held = length.get(row, 0)
        if kind == "note":
            for segment in allocator.note(row, held, number, until):
                for i in range(segment.tokens):
                    places[row, segment.start + i] = (segment.block, segment.offset + i)
            length[row] = held + number
        elif kind == "cut":
            length[row] = min(held, number)
            allocator.cut(row, length[row])
        else:
            length.pop(row, None)
            allocator.forget([row])
        allocator.check()
        for each in length:
            known = allocator.known(each)
            assert known.stop <= max(min(until, length[each]), known.start)
            assert known.start % PAGE == 0
            slot = known.start
            for segment in allocator.segments(each, known.start, known.stop) if known else ():
                assert segment.offset + segment.tokens <= BLOCK
                for i in range(segment.tokens):
                    assert places[each, slot + i] == (segment.block, segment.offset + i)
                slot += segment.tokens
            assert slot == max(known.stop, known.start) or not known


def test_inputs_after_a_cached_prefix_start_at_the_next_page():
    allocator = ActivationAllocator(4, BLOCK, PAGE)

    assert [s.start for s in allocator.note(0, 5, 9, 100)] == [8]
    assert allocator.known(0) == range(8, 14)


def test_inputs_end_if_no_block_is_free():
    allocator = ActivationAllocator(2, BLOCK, PAGE)
    allocator.note(0, 0, 30, 100)

    assert allocator.known(0) == range(2 * BLOCK)
    assert allocator.note(1, 0, 4, 100) == []
    assert allocator.known(1) == range(0)
    assert allocator.used_blocks == allocator.peak_blocks == 2
