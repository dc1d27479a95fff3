"""What the stack bench serves: many requests at once behind one system prompt, of mixed lengths."""

import random
from dataclasses import dataclass

from benchmarks.common.workload import SHAPES
from quire.errors import ConfigError
from quire.layout.model import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class StackLoad:
    """Requests and the memory they share.

    The article's mixed workload (1,024 tokens in, 512 out, sequences of at most 8,192), all lengths
    divided by 8. Lengths of questions and answers are drawn between half and one and a half times
    their mean.

    Attributes:
        model: a name in SHAPES, random weights in bfloat16.
        requests: all there at the start.
        system_tokens: every prompt begins with.
        question_tokens: mean of what follows.
        answer_tokens: mean of what is generated.
        longest_tokens: a contiguous store reserves for.
        contiguous_rows: so many of these fit in the memory.
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
                f"expected requests within longest_tokens={self.longest_tokens}, got up to "
                f"{longest} tokens: lower question_tokens or answer_tokens"
            )

    @property
    def mean_tokens(self) -> int:
        """Of a request at its end."""
        return self.system_tokens + self.question_tokens + self.answer_tokens

    def kv_bytes(self, spec: ModelSpec) -> int:
        """The memory, the same for every arm."""
        return spec.kv_bytes(self.longest_tokens, 2) * self.contiguous_rows

    def drawn(self) -> list[tuple[list[int], int]]:
        """Prompts and how many tokens to generate; the same in every process."""
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
