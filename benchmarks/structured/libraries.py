"""Compares llguidance and xgrammar on one tokenizer.

Run it in an environment with both libraries, which Quire itself does not need:

    python -m benchmarks.structured.libraries --tokenizer FOLDER [--repeats 5]

For every grammar and library it prints the time to compile the grammar, and per token the time to
compute the mask and to consume the token, in microseconds. Both libraries get the same tokens: the
tokenized text of a valid output. Each repeat compiles the grammar again, libraries alternate.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "role": {"enum": ["admin", "user", "guest"]},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 8},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string"}},
            "required": ["street", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "role", "tags", "address"],
    "additionalProperties": False,
}
PERSON_TEXT = json.dumps(
    {
        "name": "Ada Lovelace of Marylebone",
        "age": 36,
        "role": "admin",
        "tags": ["mathematician", "first programmer", "writer"],
        "address": {"street": "12 St James's Square, London", "zip": "SW1Y 4JH"},
    }
)
MANY: dict[str, Any] = {
    "type": "object",
    "properties": {
        f"field_{i}": {"anyOf": [{"type": "string", "maxLength": 20}, {"type": "number"}]}
        for i in range(100)
    },
    "required": [f"field_{i}" for i in range(100)],
    "additionalProperties": False,
}
MANY_TEXT = json.dumps({f"field_{i}": f"value {i}" if i % 2 else i / 8 for i in range(100)})
REGEX = r"[A-Z][a-z]{1,20}( [A-Z][a-z]{1,20}){0,3} <[a-z0-9.]{1,30}@[a-z0-9.]{1,30}\.(com|org)>"
GRAMMARS: dict[str, tuple[str, str, str]] = {
    "person": ("json", json.dumps(PERSON), PERSON_TEXT),
    "100 fields": ("json", json.dumps(MANY), MANY_TEXT),
    "any object": ("json", '{"type": "object"}', PERSON_TEXT),
    "regex": ("regex", REGEX, "Ada Lovelace <ada.lovelace@example.org>"),
}


class Library(Protocol):
    """One library with its tokenizer."""

    def compile(self, kind: str, text: str) -> Any:
        """Compile a grammar; return a matcher at its start."""

    def mask(self, matcher: Any) -> None:
        """Compute the mask of the next token."""

    def consume(self, matcher: Any, token_id: int) -> bool:
        """Consume a token."""


class Llguidance:
    """Library llguidance."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        import llguidance.hf

        self._module, self._tokenizer = llguidance, llguidance.hf.from_tokenizer(tokenizer)
        self._row = np.zeros((self._tokenizer.vocab_size + 31) // 32, dtype=np.int32)

    def compile(self, kind: str, text: str) -> Any:
        """See `Library`."""
        matcher = self._module.LLMatcher
        make = matcher.grammar_from_regex if kind == "regex" else matcher.grammar_from_json_schema
        made = matcher(self._tokenizer, make(text))
        assert not made.is_error(), made.get_error()
        return made

    def mask(self, matcher: Any) -> None:
        """See `Library`."""
        matcher.unsafe_compute_mask_ptr(self._row.ctypes.data, self._row.nbytes)

    def consume(self, matcher: Any, token_id: int) -> bool:
        """See `Library`."""
        return bool(matcher.consume_token(token_id))


class Xgrammar:
    """Library xgrammar."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        import xgrammar

        self._module = xgrammar
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer)
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._row = xgrammar.allocate_token_bitmask(1, info.vocab_size)

    def compile(self, kind: str, text: str) -> Any:
        """See `Library`."""
        compiler = self._compiler
        if kind == "regex":
            return self._module.GrammarMatcher(compiler.compile_regex(text))
        return self._module.GrammarMatcher(compiler.compile_json_schema(text))

    def mask(self, matcher: Any) -> None:
        """See `Library`."""
        matcher.fill_next_token_bitmask(self._row)

    def consume(self, matcher: Any, token_id: int) -> bool:
        """See `Library`."""
        return bool(matcher.accept_token(token_id))


def measure(library: Library, kind: str, text: str, token_ids: list[int]) -> dict[str, float]:
    """Measure one grammar.

    Returns:
        Compile time in ms; median, 99th percentile and maximum of the mask, median of the
        consumption in microseconds.
    """
    gc.collect()
    started = time.perf_counter_ns()
    matcher = library.compile(kind, text)
    compiled = time.perf_counter_ns() - started
    masks, consumed = [], []
    for token_id in token_ids:
        before = time.perf_counter_ns()
        library.mask(matcher)
        between = time.perf_counter_ns()
        assert library.consume(matcher, token_id), token_id
        masks.append((between - before) / 1e3)
        consumed.append((time.perf_counter_ns() - between) / 1e3)
    return {
        "compile_ms": compiled / 1e6,
        "mask_us": statistics.median(masks),
        "mask_mean_us": statistics.fmean(masks),
        "mask_p99_us": float(np.percentile(masks, 99)),
        "mask_max_us": max(masks),
        "consume_us": statistics.median(consumed),
    }


def rows(tokenizer: PreTrainedTokenizerFast, repeats: int) -> Iterator[dict[str, object]]:
    """Yield one row per grammar and library: medians over the repeats."""
    libraries: dict[str, Library] = {}
    for name, make in _LIBRARIES.items():
        started = time.perf_counter()
        libraries[name] = make(tokenizer)
        setup_ms = (time.perf_counter() - started) * 1e3
        yield {"library": name, "tokenizer_ms": round(setup_ms, 1)}
    for grammar, (kind, text, output) in GRAMMARS.items():
        token_ids = tokenizer(output, add_special_tokens=False).input_ids
        found: dict[str, list[dict[str, float]]] = {name: [] for name in libraries}
        for _ in range(repeats + 1):
            for name, library in libraries.items():
                try:
                    found[name].append(measure(library, kind, text, token_ids))
                except AssertionError as error:
                    yield {"library": name, "grammar": grammar, "error": str(error)}
        for name, measured in found.items():
            if not measured:
                continue
            after = measured[1:]
            first = {"first_compile_ms": measured[0]["compile_ms"]}
            row = first | {k: statistics.median(m[k] for m in after) for k in after[0]}
            rounded = {key: round(value, 2) for key, value in row.items()}
            yield {"library": name, "grammar": grammar, "tokens": len(token_ids)} | rounded


_LIBRARIES: dict[str, Callable[[PreTrainedTokenizerFast], Library]] = {
    "llguidance": Llguidance,
    "xgrammar": Xgrammar,
}


def main() -> None:
    """Print one JSON object per row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    assert isinstance(tokenizer, PreTrainedTokenizerFast), "expected a tokenizer.json"
    for row in rows(tokenizer, options.repeats):
        print(json.dumps(row))


if __name__ == "__main__":
    main()
