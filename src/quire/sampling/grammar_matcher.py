"""The state of one sequence in its grammar, and the masks of a step's sequences.

A matcher is a function of the output tokens: it consumes the tokens that it has not seen, and goes
back if the sequence was exchanged, as beams are. So a preemption does not change it.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Bool, UInt8

from quire.scheduler.request import Request

if TYPE_CHECKING:
    from llguidance import LLMatcher

_MAX_REASON, _MAX_LINE = 300, 60  # characters of a reason of the library, and of its lines

TOO_LARGE = "structured_outputs is too large"
"""Start of the errors of limits that only the generation of an output reaches."""

_IS_LIMIT = re.compile(
    r"too (many|big|large|complex)|max is|fuel|exceed|[Ll]imit|Unable to determine"
)
_ADVICE = {
    _IS_LIMIT: "use lower counts and less nesting of quantifiers and lists, and fewer optional "
    "parts, properties and alternatives",
    re.compile("NoExtension"): "no text matches it",
    re.compile("oneOf constraints"): "write anyOf, or options that exclude each other by their "
    "types or by a `required` property with a `const`",
    re.compile("Unknown format"): "leave out `format`, or give a `pattern`",
}


class GrammarMatcher:
    """The state of one sequence in its grammar."""

    def __init__(self, copy: "Callable[[], LLMatcher]", first_mask: bytes) -> None:
        self._copy, self._first_mask = copy, first_mask
        self._matcher: LLMatcher | None = None
        self._consumed: list[int] = []
        self._mask: bytes | None = first_mask
        self.error: str | None = None

    def fork(self) -> "GrammarMatcher":
        return GrammarMatcher(self._copy, self._first_mask)

    def close(self) -> None:
        self._matcher, self._mask, self._consumed = None, self._first_mask, []

    def mask(self, output_token_ids: Sequence[int]) -> UInt8[np.ndarray, " bytes"]:
        """Return the mask of the next token: bit i % 8 of byte i // 8 is token i.

        Without any bit if the grammar cannot continue; `error` then has the reason.
        """
        self._go_to(output_token_ids)
        if self._mask is None:
            self._mask = self._compute()
        return np.frombuffer(self._mask, dtype=np.uint8)

    def must_end(self, output_token_ids: Sequence[int]) -> bool:
        self._go_to(output_token_ids)
        return self._matcher is not None and self.error is None and self._matcher.is_stopped()

    def _go_to(self, token_ids: Sequence[int]) -> None:
        if self.error is not None:
            return
        count = len(self._consumed)
        if count > len(token_ids) or self._consumed != token_ids[:count]:
            count = self._go_back(_common(self._consumed, token_ids))
        new = list(token_ids[count:])
        if not new:
            return
        if self._matcher is None:
            self._matcher = self._copy()
        self._mask = None
        self._consumed += new
        if not self._matcher.consume_tokens(new):
            self._fail(self._matcher.get_error())

    def _go_back(self, count: int) -> int:
        """Go back to the first `count` tokens, or to the start; return the number of tokens."""
        surplus = len(self._consumed) - count
        self._mask = None
        if self._matcher is None or not count or not self._matcher.rollback(surplus):
            self._matcher, self._mask, count = None, self._first_mask, 0
        del self._consumed[count:]
        return count

    def _compute(self) -> bytes:
        if self._matcher is None or self.error is not None:
            return bytes(len(self._first_mask))
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            self._fail(self._matcher.get_error())
            return bytes(len(mask))
        return mask

    def _fail(self, reason: str) -> None:
        kind = TOO_LARGE if _IS_LIMIT.search(reason) else "structured_outputs cannot continue"
        self.error = f"{kind}: {shown_reason(reason)}"


def shown_reason(reason: str) -> str:
    """The library's reason of an error on one bounded line, and what to change.

    Its lines quote the grammar.
    """
    lines = [line.strip() for line in reason.splitlines()]
    lines = [line[:_MAX_LINE] for line in lines if line and line != "<non-verbose/>"]
    advice = [text for found, text in _ADVICE.items() if found.search(reason)]
    return "; ".join([" ".join(lines)[:_MAX_REASON], *advice])


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Number of equal tokens at the start."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def unpacked(
    masks: Sequence[UInt8[np.ndarray, " bytes"]], vocab_size: int
) -> Bool[np.ndarray, "rows vocab"]:
    """Convert masks to one bool per token."""
    bits = np.unpackbits(np.stack(masks), axis=1, bitorder="little")
    return bits[:, :vocab_size].astype(np.bool_)


class MaskWorker:
    """Computes the masks of a step in a thread while the model computes its logits."""

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None

    @contextmanager
    def computed(self, requests: Sequence[Request], tokens: Sequence[int]) -> Iterator[None]:
        """Compute the masks while the body runs, which must not use the matchers."""
        ready = [
            request
            for request, count in zip(requests, tokens, strict=True)
            if request.matcher is not None
            and count == request.num_uncomputed + len(request.draft_token_ids)
            and not request.progress.num_pending  # the output so far is not known yet
        ]
        if not ready:
            yield
            return
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="quire-grammar")
        masks = self._executor.submit(_compute_masks, ready)
        try:
            yield
        finally:
            masks.result()


def _compute_masks(requests: Iterable[Request]) -> None:
    for request in requests:
        if request.matcher is not None:
            request.matcher.mask(request.output_token_ids)
