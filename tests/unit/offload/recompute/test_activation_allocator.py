"""Blocks of attention inputs: each one sequence's or free, whatever is written, cut, forgotten."""

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
def test_what_is_known_is_where_it_was_written(actions, until):
    """Against a record of every slot's place."""
    book, length, places = ActivationAllocator(7, BLOCK, PAGE), {}, {}
    for kind, row, number in actions:
        held = length.get(row, 0)
        if kind == "note":
            for segment in book.note(row, held, number, until):
                for i in range(segment.tokens):
                    places[row, segment.start + i] = (segment.block, segment.offset + i)
            length[row] = held + number
        elif kind == "cut":
            length[row] = min(held, number)
            book.cut(row, length[row])
        else:
            length.pop(row, None)
            book.forget([row])
        book.check()
        for each in length:
            known = book.known(each)
            assert known.stop <= max(min(until, length[each]), known.start)
            assert known.start % PAGE == 0
            slot = known.start
            for segment in book.segments(each, known.start, known.stop) if known else ():
                assert segment.offset + segment.tokens <= BLOCK
                for i in range(segment.tokens):
                    assert places[each, slot + i] == (segment.block, segment.offset + i)
                slot += segment.tokens
            assert slot == max(known.stop, known.start) or not known


def test_a_cached_prefix_has_no_inputs_and_the_next_page_begins_them():
    book = ActivationAllocator(4, BLOCK, PAGE)

    assert [s.start for s in book.note(0, 5, 9, 100)] == [8]
    assert book.known(0) == range(8, 14)


def test_where_there_is_no_room_inputs_end():
    book = ActivationAllocator(2, BLOCK, PAGE)
    book.note(0, 0, 30, 100)

    assert book.known(0) == range(2 * BLOCK)
    assert book.note(1, 0, 4, 100) == []
    assert book.known(1) == range(0)
    assert book.used_blocks == book.peak_blocks == 2
