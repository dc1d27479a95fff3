"""Compiles structured outputs to grammars over a model's tokens, with the library llguidance.

    StructuredOutputs ── GrammarCompiler ──► CompiledGrammar ── matcher() ──► GrammarMatcher
    (schema, regex)      (LRU cache)         (start state)                   (one sequence)

The limits of llguidance bound the time and memory of a compilation and of a mask. It parses lazily
(an Earley parser over a lexer of derivatives), so most of the work is done per token.
"""

import json
import random
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np
from jaxtyping import UInt8

from quire.config.structured_outputs import FIELD, StructuredOutputs
from quire.errors import ConfigError, QueueFull, RequestError
from quire.layout.extras import require_extra
from quire.sampling.grammar_dialects import DialectRewriter
from quire.sampling.grammar_matcher import GrammarMatcher, shown_reason

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from transformers import PreTrainedTokenizerBase

MAX_COMPILED = 32
"""Compiled grammars in the cache; one with the largest lexer takes about 30 MB."""

COMPILE_TIMEOUT_S = 5.0
"""Longest compilation. llguidance's limits end most of its phases within about a second."""

MAX_COMPILATIONS = 8
"""Limit of the compilations that run at once, with those that have taken too long."""

COMPILE_STACK_BYTES = 128 << 20
"""Stack of a compilation; only the part that it uses takes memory."""

_STACK_SIZE_LOCK = threading.Lock()  # the size is one setting of the process

LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 1_000_000,
    "step_max_items": 50_000,
    "max_items_in_row": 9_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
}
"""Limits of `llguidance.LLParserLimits`; a mask that exceeds them fails its request.

An object with `MAX_OPTIONAL_PROPERTIES` takes four items of each. Masks near the limits take about
0.1 s.
"""

_PROBES, _PROBE_TOKENS = 2, 12
"""Random outputs, and their tokens, that a new grammar must be able to begin with."""

_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)

ANY_WHITESPACE = r"[ \t\r\n]{1,32}"
"""Default whitespace between elements of JSON: bounded, since models can repeat it without end."""


class CompiledGrammar:
    """A compiled grammar at its start; sequences get matchers that share it."""

    __slots__ = ("__weakref__", "_first_mask", "_lock", "_start")

    def __init__(self, start: "LLMatcher", first_mask: bytes) -> None:
        self._start, self._first_mask = start, first_mask
        self._lock = threading.Lock()

    def matcher(self) -> GrammarMatcher:
        return GrammarMatcher(self._copy, self._first_mask)

    def _copy(self) -> "LLMatcher":
        with self._lock:
            return self._start.deep_copy()


class GrammarCompiler:
    """Compiles and caches the grammars of a model. Thread-safe."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase | None",
        vocab_size: int,
        eos_token_ids: Iterable[int],
    ) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._running = threading.BoundedSemaphore(MAX_COMPILATIONS)
        self._tokens: LLTokenizer | None = None
        self._lock, self._tokens_lock = threading.Lock(), threading.Lock()
        self._cache: OrderedDict[StructuredOutputs, CompiledGrammar] = OrderedDict()
        self._in_use: WeakValueDictionary[StructuredOutputs, CompiledGrammar] = (
            WeakValueDictionary()
        )

    def compile(self, wanted: StructuredOutputs) -> CompiledGrammar:
        """Return the compiled grammar: from the cache, or one that is in use, else a new one.

        A caller that keeps the result compiles in one thread and finds it in another.
        """
        with self._lock:
            found = self._in_use.get(wanted)
        compiled = self._compile_in_time(wanted) if found is None else found
        with self._lock:
            self._in_use[wanted] = self._cache[wanted] = compiled
            self._cache.move_to_end(wanted)
            while len(self._cache) > MAX_COMPILED:
                self._cache.popitem(last=False)
        return compiled

    def _compile_in_time(self, wanted: StructuredOutputs) -> CompiledGrammar:
        """Compile in a thread of its own, which ends later if it takes too long.

        The library recurses along references, with up to 5 KB of the stack for each: those of a
        schema of `MAX_GRAMMAR_BYTES` exceed the usual stack, which would end the process.
        """
        tokens = self._token_trie()
        if not self._running.acquire(timeout=COMPILE_TIMEOUT_S):
            raise QueueFull(
                f"{MAX_COMPILATIONS} structured outputs are being compiled: send the request again",
                retry_after_s=COMPILE_TIMEOUT_S,
            )
        compiled: Future[CompiledGrammar] = Future()

        def run() -> None:
            try:
                compiled.set_result(self._compile(wanted, tokens))
            except BaseException as error:  # noqa: BLE001 - the caller raises it
                compiled.set_exception(error)
            finally:
                self._running.release()

        with _STACK_SIZE_LOCK:
            before = threading.stack_size(COMPILE_STACK_BYTES)
            try:
                threading.Thread(target=run, name="quire-compile", daemon=True).start()
            except RuntimeError:  # no thread can be started
                self._running.release()
                raise
            finally:
                threading.stack_size(before)
        try:
            return compiled.result(COMPILE_TIMEOUT_S)
        except TimeoutError:
            raise _refusal(
                wanted, f"it takes more than {COMPILE_TIMEOUT_S:g} s to compile: simplify it"
            ) from None

    def _compile(self, wanted: StructuredOutputs, tokens: "LLTokenizer") -> CompiledGrammar:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(verbose_errors=False, **LIMITS)
        try:
            text = _grammar_text(wanted)
        except (ValueError, RecursionError) as error:
            raise _refusal(wanted, str(error)) from None
        start = LLMatcher(tokens, text, log_level=0, limits=limits)
        if start.is_error():
            raise _refusal(wanted, shown_reason(start.get_error()))
        mask = start.compute_bitmask()
        if start.is_error():
            raise _refusal(wanted, shown_reason(start.get_error()))
        if not self._text_tokens(mask).any():
            raise _refusal(wanted, "it matches no text, or only the empty text")
        for seed in range(_PROBES):
            self._probe(wanted, start.deep_copy(), random.Random(seed))
        return CompiledGrammar(start, mask)

    def _probe(
        self, wanted: StructuredOutputs, matcher: "LLMatcher", choice: random.Random
    ) -> None:
        """Begin a random output, since most grammars that are too large fail at once."""
        for _ in range(_PROBE_TOKENS):
            allowed = np.flatnonzero(self._text_tokens(matcher.compute_bitmask()))
            if len(allowed):
                matcher.consume_token(int(choice.choice(allowed)))
            if matcher.is_error():
                raise _refusal(wanted, shown_reason(matcher.get_error()))
            if not len(allowed) or matcher.is_stopped():
                return

    def _text_tokens(self, mask: bytes) -> UInt8[np.ndarray, " tokens"]:
        """The tokens that a mask allows except the end-of-sequence tokens."""
        bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")
        bits[self._eos_token_ids] = 0
        return bits

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
    """Convert a structure to the library's format of grammars."""
    from llguidance import LLMatcher

    rewriter = DialectRewriter()
    if wanted.regex is not None:
        return LLMatcher.grammar_from_regex(rewriter.regex(wanted.regex))
    if wanted.choice is not None:
        texts = (json.dumps(text, ensure_ascii=False) for text in wanted.choice)
        # one token of the lexer: alternatives of the parser would count towards `max_items_in_row`
        return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(texts))
    if wanted.grammar is not None:
        return LLMatcher.grammar_from_lark(rewriter.lark(_as_lark(wanted.grammar)))
    options: dict[str, Any] = {"whitespace_flexible": not wanted.disable_any_whitespace}
    if not wanted.disable_any_whitespace:
        options["whitespace_pattern"] = rewriter.regex(wanted.whitespace_pattern or ANY_WHITESPACE)
    schema = rewriter.schema(wanted.json or '{"type": "object"}')
    return LLMatcher.grammar_from_json_schema(schema, overrides=options)  # type: ignore[arg-type]


def _as_lark(text: str) -> str:
    """Convert a grammar from GBNF, if it has rules of that format.

    llguidance's own detection of the format takes minutes for many empty lines.
    """
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if _GBNF_RULE.search(text) is None:
        return text
    try:
        return gbnf_to_lark(text)
    except Exception as error:  # noqa: BLE001 - the library raises plain Exceptions here
        raise ValueError(f"GBNF cannot be converted to Lark: {error}") from None


def _refusal(wanted: StructuredOutputs, reason: str) -> RequestError:
    message = f"{wanted.kind} cannot be compiled: {reason}"
    return RequestError(message, param=wanted.param)
