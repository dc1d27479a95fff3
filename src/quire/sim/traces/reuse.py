"""How much of a trace's prompts could come from a cache that forgets nothing."""

from collections.abc import Iterable
from dataclasses import dataclass

from quire.sim.traces.base import TraceRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Reuse:
    """What has been asked before, over all prompts of a trace.

    Attributes:
        block_fraction: pieces of prompts (a block of 512 tokens for each hash id of Mooncake) that
            stood in an earlier prompt, over all pieces: what Mooncake counts.
        token_fraction: tokens of the pieces from a prompt's begin up to its first new one, over
            all tokens of prompts: what a prefix cache can save.
    """

    block_fraction: float
    token_fraction: float


def reusable(requests: Iterable[TraceRequest]) -> Reuse:
    """Count what requests repeat of requests before them.

    Source: Mooncake section 4.2, cache hits with a pool of any size.
    """
    seen: set[int] = set()
    blocks = repeated_blocks = tokens = repeated_tokens = 0
    for request in requests:
        contents = [segment.content for segment in request.prompt]
        known = [content in seen for content in contents]
        blocks += len(known)
        repeated_blocks += sum(known)
        prefix = known.index(False) if False in known else len(known)
        tokens += request.prompt_tokens
        repeated_tokens += sum(segment.tokens for segment in request.prompt[:prefix])
        seen.update(contents)
        seen.add(request.answer.content)
    return Reuse(block_fraction=repeated_blocks / blocks, token_fraction=repeated_tokens / tokens)
