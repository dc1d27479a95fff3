"""Blocks of a file of requests against its lines."""

from hypothesis import given
from hypothesis import strategies as st

from quire.scale.batch import line_blocks, read_lines

CONTENT = st.binary(max_size=6).map(lambda line: line.replace(b"\n", b""))


@given(
    st.lists(CONTENT | st.sampled_from([b"", b"  ", b"\r", b'{"id": 1}']), max_size=24),
    st.sets(st.integers(1, 24)),
    st.integers(1, 5),
    st.booleans(),
)
def test_blocks_have_each_remaining_line_once(tmp_path_factory, lines, completed, most, ends):
    source = tmp_path_factory.mktemp("lines") / "in.jsonl"
    source.write_bytes(b"\n".join(lines) + (b"\n" if ends else b""))
    with source.open("rb") as file:
        wanted = [
            (number, raw.rstrip(b"\n"))
            for number, raw in enumerate(file, start=1)
            if raw.strip() and number not in completed
        ]

    blocks = list(line_blocks(source, completed, most))
    found = [list(read_lines(source, block)) for block in blocks]

    assert [line for block in found for line in block] == wanted
    assert all(0 < len(block) <= most for block in found)
    assert all(len(block) == most for block in found[:-1])
