"""KVzip (Kim et al. 2025, arXiv 2505.23416): attention of the prompt's own repetition to it.

score(token) = max over the queries of the scoring pass and over the group of the weight

After the prompt, a text that asks to repeat it and the prompt itself are computed, in chunks of
2048 tokens. A token is retained if the model attends to it when it writes the prompt again, so that
a question that comes later, as a forced continuation, finds what it needs. Each query's softmax is
over the prompt and the tokens of its chunk up to it. The KV of the repetition is removed, and the
prompt is evicted once. Its last token is computed before, so the first output token is that of the
whole prompt.

Differs from the paper: every chunk scores the whole prompt, and its softmax has no gaps; the
authors' code scores only the same chunk of the prompt, over the sinks, it and the repetition (equal
for prompts of one chunk). The paper ranks the tokens of all heads and layers together;
`budget=ada` divides each layer over its heads. The texts are those of the paper, without the
model's chat template. The whole prompt is repeated, also its system message. Without a tokenizer
the prompt is repeated without a text. KVzip+, which also weighs values, is not included.
"""

from dataclasses import dataclass

from quire.layout.statistics import MAX, AttentionMax, ScoringPass, Statistic
from quire.policies.base import Keep, StoredScore, StoredScorePolicy
from quire.policies.options import check_at_least
from quire.policies.registry import register


@register("kvzip")
@dataclass(frozen=True, slots=True)
class KVzip(StoredScorePolicy):
    """Retain the tokens that the model attends to most when it repeats the prompt.

    Attributes:
        sinks: tokens at the start of the sequence that are never evicted.
        chunk: tokens of the prompt that are repeated at a time; less needs less memory and context.
        heads: reduction over the query heads of a KV head, for each query: mean, max or sum.
    """

    cost = "a scoring pass: about 1 to 2 times the prefill, once"
    reads_vectors = False

    sinks: int = 4
    chunk: int = 2048
    heads: str = MAX

    def __post_init__(self) -> None:
        check_at_least(0, sinks=self.sinks)
        check_at_least(1, chunk=self.chunk)
        _ = self.statistics  # refuses an unknown reduction

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        repeat = ScoringPass(
            name="repeat",
            first="\n\nRepeat the previous context:",
            later="\n\nRepeat the part of the previous context that starts with",
            end=":",
            chunk_tokens=self.chunk,
            overlap=8,
        )
        return (AttentionMax(self.heads, of=repeat),)

    @property
    def min_cap(self) -> int:
        return self.sinks + 1

    @property
    def lanes_apart(self) -> bool:
        return True

    @property
    def stored_score(self) -> StoredScore:
        return StoredScore(self.statistics[0])

    def protected_ends(self, keep: Keep) -> tuple[int, int | Keep]:
        del keep
        return self.sinks, 0
