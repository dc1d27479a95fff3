"""Load of the stack benchmark: simultaneous requests of mixed lengths with one system prompt."""

import random
from dataclasses import dataclass

from benchmarks.common.workload import SHAPES
from quire.errors import ConfigError
from quire.layout.model import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class StackLoad:
    """Requests and the size of the KV memory that they share.

    The article's mixed workload (1,024 tokens in, 512 out, sequences of at most 8,192), with all
    lengths divided by 8. Lengths of questions and outputs are drawn between 0.5 and 1.5 times their
    mean.

    Attributes:
        model: a name in SHAPES; random weights in bfloat16.
        requests: number of requests, all present at the start.
        system_tokens: tokens of the system prompt, the common prefix of all prompts.
        question_tokens: mean tokens of a prompt after the system prompt.
        answer_tokens: mean tokens of an output.
        longest_tokens: tokens of a row of the static slab.
        contiguous_rows: number of these rows that fit in the memory.
    """

    model: str = "125m"
    requests: int = 128
    system_tokens: int = 64
    question_tokens: int = 64
    answer_tokens: int = 64
    longest_tokens: int = 1_024
    contiguous_rows: int = 4

    def __post_init__(self) -> None:
        longest = self.system_tokens + 3 * (self.question_tokens + self.answer_tokens) // 2
        if longest > self.longest_tokens:
            raise ConfigError(
                f"expected requests of at most longest_tokens={self.longest_tokens}, got up to "
                f"{longest} tokens: lower question_tokens or answer_tokens"
            )

    @property
    def mean_tokens(self) -> int:
        """Mean final length of a request."""
        return self.system_tokens + self.question_tokens + self.answer_tokens

    def kv_bytes(self, spec: ModelSpec) -> int:
        """Bytes of the KV memory, equal for every arm."""
        return spec.kv_bytes(self.longest_tokens, 2) * self.contiguous_rows

    def drawn(self) -> list[tuple[list[int], int]]:
        """Prompts and numbers of tokens to generate; equal in every process."""
        rng = random.Random(0)
        vocab_size = SHAPES[self.model]().vocab_size

        def tokens(count: int) -> list[int]:
            return [rng.randrange(vocab_size) for _ in range(count)]

        def length(mean: int) -> int:
            return rng.randint(mean - mean // 2, mean + mean // 2)

        system = tokens(self.system_tokens)
        return [
            ([*system, *tokens(length(self.question_tokens))], length(self.answer_tokens))
            for _ in range(self.requests)
        ]
