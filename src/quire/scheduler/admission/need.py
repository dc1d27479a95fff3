"""What the page count of a sequence depends on: tokens, evictions, sizes of its steps.

Step shapes, the preferred ones first; a later one is used if the sequence does not fit otherwise:

2 staging slots   prefill chunks of 2048, 1024, ... 1 token, whose KV is completely in the arena
1 staging slot    the same chunks; a layer's prefetch waits until the previous layer is computed
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.layout.eviction import KEEP_ALL, EvictionSpec
from quire.layout.layout import SLOTS
from quire.scheduler.request import Request

Tokens = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Need:
    """Length and eviction specification of a sequence, which determine its page count.

    Attributes:
        tokens: its length.
        prompt_tokens: length of its prompt; None: `tokens`.
        eviction: its eviction specification, including the statistics of its tokens.
        may_offload: whether its oldest pages may be offloaded, if the engine has offload memory.
        decodes: whether its prompt is computed, so that only its pages in decoding count.
    """

    tokens: int
    prompt_tokens: int | None = None
    eviction: EvictionSpec = KEEP_ALL
    may_offload: bool = False
    decodes: bool = False

    @property
    def evicts(self) -> bool:
        """Whether a lane evicts tokens before the sequence has this length."""
        return self.eviction.cap is not None and self.tokens > self.eviction.least_cap


def need_of(request: Request, tokens: int) -> Need:
    """Return the need of a request at a length of `tokens`."""
    # caps that are set after the prompt need all pages in the KV memory, and shared prefixes too
    may_offload = (
        can_offload_request(request)
        and (request.eviction.spec.cap is None or not request.eviction.pending)
        and not request.progress.cached_tokens
    )
    prompt_tokens = len(request.prompt_token_ids)
    return Need(
        tokens,
        prompt_tokens,
        request.eviction.spec,
        may_offload,
        decodes=request.is_running and prompt_tokens <= request.progress.num_computed < tokens,
    )


def can_offload_request(request: Request) -> bool:
    """Whether the oldest pages of a request may be offloaded while it runs.

    False after a request could not load its pages back for an eviction, except that recorded
    evictions are replayed after as many tokens as before, which may fit only with KV offload.
    """
    replays = request.eviction.next_replay is not None
    return request.memory.may_offload or (request.memory.may_offload_replays and replays)


@dataclass(frozen=True, slots=True)
class NeedGroup:
    """Needs with the same eviction specification, as arrays.

    Attributes:
        eviction: the common eviction specification.
        may_offload, decodes: the common values of `Need.may_offload` and `Need.decodes`.
        index: [n] positions in the original list.
        tokens, prompts: [n] lengths of sequences and of their prompts; prompt <= sequence.
    """

    eviction: EvictionSpec
    may_offload: bool
    decodes: bool
    index: Tokens
    tokens: Tokens
    prompts: Tokens


def group_needs(needs: Sequence[Need]) -> Iterator[NeedGroup]:
    """Group needs by eviction specification, to count the pages of many at once."""
    indices: dict[tuple[int, bool, bool], list[int]] = {}
    for i, need in enumerate(needs):
        key = (id(need.eviction), need.may_offload, need.decodes)
        indices.setdefault(key, []).append(i)
    for members in indices.values():
        tokens = np.array([needs[i].tokens for i in members], dtype=np.int64)
        given = [needs[i].prompt_tokens for i in members]
        prompts = np.array([t if p is None else p for t, p in zip(tokens, given, strict=True)])
        first = needs[members[0]]
        index, prompts = np.array(members), np.minimum(prompts, tokens)
        yield NeedGroup(first.eviction, first.may_offload, first.decodes, index, tokens, prompts)


@dataclass(frozen=True, slots=True)
class StepShape:
    """Sizes of a sequence's steps, on which its page count depends.

    Attributes:
        chunk_tokens: size of its largest prefill chunk.
        staging_slots: number of layers whose offloaded pages are staged in the arena at a time.
    """

    chunk_tokens: int
    staging_slots: int = SLOTS


def step_shapes(chunk_tokens: int) -> tuple[StepShape, ...]:
    """Return the step shapes, the preferred one first, the one with the fewest pages last.

    Args:
        chunk_tokens: largest prefill chunk of the schedule.
    """
    chunks = [chunk_tokens]
    while chunks[-1] > 1:
        chunks.append(-(-chunks[-1] // 2))
    return tuple(StepShape(chunk, slots) for slots in (SLOTS, 1) for chunk in chunks)
