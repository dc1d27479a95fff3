"""Bodies are parsed as by `json.loads`, including errors; the number of nodes is limited."""

import json
import time
from itertools import product

import pytest
from fastapi import HTTPException
from hypothesis import given
from hypothesis import strategies as st

from quire.serve import json_route
from quire.serve.json_route import parse_json, refuse_many_nodes

PIECES = (
    *("[", "]", "{", "}", ",", ":", '"', "\\", "1", "-", ".5", "e3", "true", "nul", "null"),
    *("NaN", "Infinity", '"a"', '"b":', " ", "\n", "\\u00e9", "\\ud800", "\x00", "\x0b"),
    *("\xa0", "\ufeff", "1,2,3,", '"x":1', "01", "[]", "{}", "é"),
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def outcome(read, raw):
    try:
        return "read", repr(read(raw))
    except RecursionError:
        return RecursionError
    except json.JSONDecodeError as error:
        return error.msg, error.pos
    except ValueError as error:
        return type(error), str(error)


def check(raw):
    assert outcome(parse_json, raw) == outcome(json.loads, raw), raw


@given(VALUES, st.booleans(), st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-32-le"]))
def test_values_are_parsed_equally(value, is_ascii, encoding):
    text = json.dumps(value, ensure_ascii=is_ascii, indent=1)
    check(text.encode(encoding))


@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
def test_any_text_is_parsed_or_refused_equally(text):
    check(text.encode("utf-8", "surrogatepass"))


def test_all_short_texts_are_parsed_or_refused_equally():
    for letters in product('[]{},1":', repeat=4):
        check("".join(letters).encode())


@pytest.mark.parametrize(
    "raw",
    [
        *(b"\xff", b'["a\xff"]', b"[1, " + b"9" * 5_000 + b"]", b"", b'{"a":1,"a":2}', b"[1,]"),
        *(b"[" * 250 + b"]" * 250, b"[" * 100_000, b"1e999", b"-0", b"1.0000000000000001"),
    ],
)
def test_invalid_bytes_are_refused_equally(raw):
    check(raw)


@pytest.mark.parametrize("node", ["[]", "{}", '{"a": "]}::"}', '["[\\"{"]'])
def test_number_of_nodes_is_limited(node, monkeypatch):
    monkeypatch.setattr(json_route, "MAX_NODES", 9)
    nodes = 2 if "a" in node else 1
    most = 8 // nodes  # one of 9 is the enclosing array

    refuse_many_nodes(f"[{','.join([node] * most)}]")
    with pytest.raises(HTTPException, match="more than 9 arrays"):
        refuse_many_nodes(f"[{','.join([node] * (most + 1))}]")


def test_nodes_of_an_open_string_are_counted_in_linear_time():
    start_s = time.thread_time()
    refuse_many_nodes('"[' + '\\"[' * 1_000_000 + "\\")

    assert time.thread_time() - start_s < 5
