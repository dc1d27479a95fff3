"""Retrieval heads retain the whole prompt, streaming heads little (DuoAttention, Xiao et al. 2024).

A calibration gives each KV head a retrieval score (`quire calibrate --retrieval-heads`). With C =
cap - w, where w is the number of tokens every lane holds (see `pyramid`), and a prompt of n tokens:

    a streaming head          floor(streaming C) + w, at least w + 1
    the others                n each, from the highest score on, as far as the total cap reaches

The head at which the total ends gets what is left. With the rule `sinks` a streaming head retains
exactly the sinks and the newest tokens, as in the paper.

Worked: 4 heads, cap = 50, nothing protected (w = 0), n = 100, streaming = 0.2. Each gets 10, and
4 * 50 - 4 * 10 = 160 are left: 90 for the highest score, 70 for the next: 100 80 10 10.

Differs from the paper: there the fraction of retrieval heads is fixed, streaming heads hold a fixed
number of tokens, and the memory follows; here the cap is the memory, and the number of retrieval
heads follows. During decoding the caps remain, so retrieval heads evict too. The paper trains a
gate for each head; here a score is measured, see `retrieval_scores` in
`quire.eviction.calibration`. Files of the authors (`full_attention_heads.tsv`) can be used.
"""

from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from math import isfinite
from pathlib import Path

from quire.errors import ConfigError
from quire.policies.budgets.base import Budget, Shape, decimal_fraction
from quire.policies.budgets.by_layer import read_numbers
from quire.policies.registry import register_budget

MAX_FILE_BYTES = 1 << 20


@register_budget("duo")
@dataclass(frozen=True, slots=True)
class Duo(Budget):
    """KV heads with high retrieval scores retain the prompt, the others a fraction of the cap.

    Attributes:
        scores: retrieval scores of the KV heads of the layers that evict, layer-major: numbers such
            as 0.9x4/0.1x4, smollm2 for those in the package, or a file with a line for each layer
            and its numbers between tabs. Requests may name a file only if the engine's rules do.
        streaming: fraction of the cap that a streaming head retains.
    """

    by_head = True
    example = "scores=0.9x8/0.1x24"

    scores: str = ""
    streaming: float = 0.25

    def __post_init__(self) -> None:
        if not self.scores:
            raise ConfigError(
                "budget duo needs scores=smollm2, or scores=FILE of this model, as written by "
                "quire calibrate MODEL --retrieval-heads FILE"
            )
        if not 0 < self.streaming <= 1:
            raise ConfigError(f"expected 0 < streaming <= 1, got {self.streaming}")

    @property
    def file(self) -> str:
        own = self.scores in PACKAGED or read_numbers(self.scores) is not None
        return "" if own else self.scores

    def lane_capacities(self, shape: Shape) -> tuple[int, ...] | None:
        numbers = read_numbers(self.scores)
        scores = read_scores(self.scores) if numbers is None else numbers
        if len(scores) != shape.num_lanes:
            raise ConfigError(
                f"budget duo: expected {shape.num_lanes} scores ({shape.num_layers} layers that "
                f"evict, with {shape.heads} KV heads), got {len(scores)}; measure this model with "
                "quire calibrate MODEL --retrieval-heads FILE"
            )
        held = shape.least - 1
        small = max(1, int(shape.spare * decimal_fraction(self.streaming)))
        rest = max(shape.prompt_tokens - held, shape.spare) - small
        left = shape.num_lanes * (shape.spare - small)
        caps = [held + small] * shape.num_lanes
        for lane in sorted(range(len(caps)), key=lambda lane: (-scores[lane], lane)):
            more = min(rest, left)
            caps[lane], left = caps[lane] + more, left - more
        return tuple(caps)


PACKAGED = {"smollm2": "retrieval_heads_smollm2.tsv"}
"""Files of the package, by the name of their model."""


@lru_cache(maxsize=16)
def read_scores(source: str) -> tuple[float, ...]:
    """Read a file of retrieval scores, in the package or elsewhere, once.

    Raises:
        ConfigError: it cannot be read, or it is not a table of finite numbers.
    """
    packaged = PACKAGED.get(source)
    path = files("quire") / "assets" / packaged if packaged else Path(source)
    try:
        with path.open(encoding="utf-8") as file:
            scores = tuple(map(float, file.read(MAX_FILE_BYTES).split()))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"budget duo: cannot read scores={source}: {error}; write the file with quire "
            "calibrate MODEL --retrieval-heads FILE"
        ) from error
    if not scores or not all(map(isfinite, scores)):
        raise ConfigError(f"budget duo: expected finite numbers in {source}, got {scores[:5]}")
    return scores
