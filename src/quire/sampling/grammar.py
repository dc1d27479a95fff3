"""Compiles structured outputs to grammars over a model's tokens, with the library llguidance.

    StructuredOutputs ── GrammarCompiler ──► CompiledGrammar ── matcher() ──► GrammarMatcher
    (schema, regex)      (LRU cache)         (start state)                   (one sequence)

The limits of llguidance bound the time and memory of a compilation and of a mask. It parses lazily
(an Earley parser over a lexer of derivatives), so most of the work is done per token.
"""

import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np

from quire.config.structured_outputs import FIELD, StructuredOutputs
from quire.errors import ConfigError, RequestError
from quire.layout.extras import require_extra
from quire.sampling.grammar_matcher import GrammarMatcher, shown_reason

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from transformers import PreTrainedTokenizerBase

MOST_COMPILED = 32
"""Compiled grammars in the cache; one with the largest lexer takes about 30 MB."""

COMPILE_TIMEOUT_S = 5.0
"""Longest compilation. llguidance's limits end each of its phases within about a second."""

LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_items_in_row": 1_500,
    "max_lexer_states": 5_000,
    "max_grammar_size": 200_000,
}
"""Limits of `llguidance.LLParserLimits`; a mask that exceeds them fails its request."""

_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)

ANY_WHITESPACE = r"[ \t\r\n]{1,32}"
"""Default whitespace between elements of JSON: bounded, since models can repeat it without end."""


class CompiledGrammar:
    """A compiled grammar at its start; sequences get matchers that share it.

    Args:
        start: matcher of the library at the start of the grammar.
        first_mask: its mask of the first token.
    """

    __slots__ = ("__weakref__", "_first_mask", "_lock", "_start")

    def __init__(self, start: "LLMatcher", first_mask: bytes) -> None:
        self._start, self._first_mask = start, first_mask
        self._lock = threading.Lock()

    def matcher(self) -> GrammarMatcher:
        """Return a matcher for one sequence."""
        return GrammarMatcher(self._copy, self._first_mask)

    def _copy(self) -> "LLMatcher":
        with self._lock:
            return self._start.deep_copy()


class GrammarCompiler:
    """Compiles and caches the grammars of a model. Thread-safe.

    Args:
        tokenizer: the model's tokenizer; None: every grammar is refused.
        vocab_size: number of token ids of the model.
        eos_token_ids: end-of-sequence tokens, which are allowed where a grammar may end.
        clock: time in seconds, for the timeout.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase | None",
        vocab_size: int,
        eos_token_ids: Iterable[int],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._eos_token_ids, self._clock = list(eos_token_ids), clock
        self._tokens: LLTokenizer | None = None
        self._lock, self._tokens_lock = threading.Lock(), threading.Lock()
        self._cache: OrderedDict[StructuredOutputs, CompiledGrammar] = OrderedDict()
        self._in_use: WeakValueDictionary[StructuredOutputs, CompiledGrammar] = (
            WeakValueDictionary()
        )

    def compile(self, wanted: StructuredOutputs) -> CompiledGrammar:
        """Return the compiled grammar: from the cache, or one that is in use, else a new one.

        A caller that keeps the result compiles in one thread and finds it in another.

        Args:
            wanted: the structure.

        Raises:
            RequestError: a grammar that is invalid, unsupported, too complex, or that no text or
                only the empty text matches; a model without a fast tokenizer; a missing package.
        """
        with self._lock:
            found = self._in_use.get(wanted)
        compiled = self._compile(wanted) if found is None else found
        with self._lock:
            self._in_use[wanted] = self._cache[wanted] = compiled
            self._cache.move_to_end(wanted)
            while len(self._cache) > MOST_COMPILED:
                self._cache.popitem(last=False)
        return compiled

    def _compile(self, wanted: StructuredOutputs) -> CompiledGrammar:
        tokens = self._token_trie()
        from llguidance import LLMatcher, LLParserLimits

        deadline_s = self._clock() + COMPILE_TIMEOUT_S
        limits = LLParserLimits(verbose_errors=False, **LIMITS)
        try:
            text = _grammar_text(wanted)
        except (ValueError, RecursionError) as error:
            raise _refusal(wanted, str(error)) from None
        self._check_time(wanted, deadline_s)
        start = LLMatcher(tokens, text, log_level=0, limits=limits)
        self._check_time(wanted, deadline_s)
        if start.is_error():
            raise _refusal(wanted, start.get_error())
        mask = start.compute_bitmask()
        self._check_time(wanted, deadline_s)
        if start.is_error():
            raise _refusal(wanted, start.get_error())
        if not self._begins(mask):
            raise _refusal(wanted, "it matches no text, or only the empty text")
        return CompiledGrammar(start, mask)

    def _begins(self, mask: bytes) -> bool:
        """Whether a mask allows any token except the end-of-sequence tokens."""
        bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")
        bits[self._eos_token_ids] = 0
        return bool(bits.any())

    def _check_time(self, wanted: StructuredOutputs, deadline_s: float) -> None:
        if self._clock() > deadline_s:
            raise _refusal(
                wanted, f"it takes more than {COMPILE_TIMEOUT_S:g} s to compile: simplify it"
            )

    def _token_trie(self) -> "LLTokenizer":
        """The library's view of the tokenizer; built once, which takes up to a second."""
        with self._tokens_lock:
            if self._tokens is None:
                self._tokens = self._make_tokens()
            return self._tokens

    def _make_tokens(self) -> "LLTokenizer":
        try:
            require_extra("structured", "structured output (response_format, tools)")
        except ConfigError as error:
            raise RequestError(str(error), param=FIELD) from None
        from llguidance.hf import from_tokenizer

        tokenizer: Any = self._tokenizer
        if tokenizer is None or not tokenizer.is_fast:
            what = "no tokenizer" if tokenizer is None else "a tokenizer written in Python"
            raise RequestError(
                f"{FIELD} needs a fast tokenizer (tokenizer.json), and this model has {what}",
                param=FIELD,
            )
        if not self._eos_token_ids:
            raise RequestError(
                f"{FIELD} needs a model with an end-of-sequence token (eos_token_id in "
                "generation_config.json or eos_token of the tokenizer), and this model has none",
                param=FIELD,
            )
        size = max(self._vocab_size, len(tokenizer))
        try:
            return from_tokenizer(tokenizer, n_vocab=size, eos_token=self._eos_token_ids)
        except ValueError as error:
            raise RequestError(
                f"{FIELD} needs the bytes of each token, which llguidance cannot derive from the "
                f"decoder of this model's tokenizer: {shown_reason(str(error))}",
                param=FIELD,
            ) from None


def _grammar_text(wanted: StructuredOutputs) -> str:
    """Convert a structure to the library's format of grammars.

    Raises:
        ValueError: a grammar whose format cannot be converted.
    """
    from llguidance import LLMatcher

    if wanted.regex is not None:
        return LLMatcher.grammar_from_regex(wanted.regex)
    if wanted.choice is not None:
        texts = (json.dumps(text, ensure_ascii=False) for text in wanted.choice)
        # one token of the lexer: alternatives of the parser would count towards `max_items_in_row`
        return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(texts))
    if wanted.grammar is not None:
        return LLMatcher.grammar_from_lark(_as_lark(wanted.grammar))
    options: dict[str, Any] = {"whitespace_flexible": not wanted.disable_any_whitespace}
    if not wanted.disable_any_whitespace:
        options["whitespace_pattern"] = wanted.whitespace_pattern or ANY_WHITESPACE
    schema = wanted.json or '{"type": "object"}'
    return LLMatcher.grammar_from_json_schema(schema, overrides=options)  # type: ignore[arg-type]


def _as_lark(text: str) -> str:
    """Convert a grammar from GBNF, if it has rules of that format.

    llguidance's own detection of the format takes minutes for many empty lines.

    Raises:
        ValueError: a grammar whose format cannot be converted.
    """
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if _GBNF_RULE.search(text) is None:
        return text
    try:
        return gbnf_to_lark(text)
    except Exception as error:  # noqa: BLE001 - the library raises plain Exceptions here
        raise ValueError(f"GBNF cannot be converted to Lark: {error}") from None


def _refusal(wanted: StructuredOutputs, reason: str) -> RequestError:
    message = f"{wanted.kind} cannot be compiled: {shown_reason(reason)}"
    return RequestError(message, param=wanted.param)
