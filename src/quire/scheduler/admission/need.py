"""What a sequence needs pages for: its tokens, what is evicted of them, the sizes of its steps.

Steps of a sequence that fits no other way, the preferred ones first:

2 staging slots   prefill chunks of 2048, 1024, ... 1 token, whose KV is in the arena whole
1 staging slot    the same chunks; a layer's offloaded pages wait for the layer before it
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
    """A sequence of some length.

    Attributes:
        tokens: it has had then.
        prompt_tokens: of which so many are its prompt; None: all.
        eviction: what of them stays, and what is remembered of them.
        may_offload: its first pages may be on the host, in engines that have room for them there.
    """

    tokens: int
    prompt_tokens: int | None = None
    eviction: EvictionSpec = KEEP_ALL
    may_offload: bool = False

    @property
    def evicts(self) -> bool:
        """Whether some lane loses tokens on the way."""
        return self.eviction.cap is not None and self.tokens > self.eviction.least_cap


def need_of(request: Request, tokens: int) -> Need:
    """What a request needs to have had so many tokens."""
    # those that evict go back into the memory for it, and so must have room there
    may_offload = (
        can_offload_request(request)
        and request.eviction.spec.cap is None
        and not request.progress.cached_tokens
    )
    return Need(tokens, len(request.prompt_token_ids), request.eviction.spec, may_offload)


def can_offload_request(request: Request) -> bool:
    """Whether the first pages of a request may be on the host while it runs.

    Not in groups, whose members share pages; not once they could not return for an eviction.
    """
    return request.group is None and request.memory.may_offload


@dataclass(frozen=True, slots=True)
class Alike:
    """Sequences that are evicted from alike, and where they stood among others.

    Attributes:
        eviction: of them all.
        may_offload: likewise.
        index: [n] their places.
        tokens, prompts: [n] of each, a prompt at most as long as its sequence.
    """

    eviction: EvictionSpec
    may_offload: bool
    index: Tokens
    tokens: Tokens
    prompts: Tokens


def alike(needs: Sequence[Need]) -> Iterator[Alike]:
    """The needs by eviction: many are counted at once, and most share a few of them."""
    places: dict[tuple[int, bool], list[int]] = {}
    for i, need in enumerate(needs):
        places.setdefault((id(need.eviction), need.may_offload), []).append(i)
    for members in places.values():
        tokens = np.array([needs[i].tokens for i in members], dtype=np.int64)
        requested = [needs[i].prompt_tokens for i in members]
        prompts = np.array([t if p is None else p for t, p in zip(tokens, requested, strict=True)])
        first = needs[members[0]]
        index, prompts = np.array(members), np.minimum(prompts, tokens)
        yield Alike(first.eviction, first.may_offload, index, tokens, prompts)


@dataclass(frozen=True, slots=True)
class StepShape:
    """What the pages of one sequence depend on besides its tokens.

    Attributes:
        chunk_tokens: of its largest prefill chunk.
        staging_slots: layers of its offloaded pages that the arena holds at a time.
    """

    chunk_tokens: int
    staging_slots: int = SLOTS


def step_shapes(chunk_tokens: int) -> tuple[StepShape, ...]:
    """The shapes of steps, the preferred one first and the one of the fewest pages last.

    Args:
        chunk_tokens: largest prefill chunk that the schedule allows.
    """
    chunks = [chunk_tokens]
    while chunks[-1] > 1:
        chunks.append(-(-chunks[-1] // 2))
    return tuple(StepShape(chunk, slots) for slots in (SLOTS, 1) for chunk in chunks)
