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

import re
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from math import isfinite
from pathlib import Path

from quire.errors import ConfigError
from quire.policies.budgets.base import Budget, Shape, decimal_fraction
from quire.policies.budgets.by_layer import read_numbers
from quire.policies.registry import register_budget

MAX_FILE_CHARACTERS = 1 << 20
_NUMBERS = re.compile(r"[-+]?\d[\d.eE+x/-]*", re.ASCII)  # not a name of a file


@register_budget("duo")
@dataclass(frozen=True, slots=True)
class Duo(Budget):
    """KV heads with high retrieval scores retain the prompt, the others a fraction of the cap.

    Attributes:
        scores: retrieval scores of the KV heads of the layers that evict, layer-major: numbers such
            as 0.9x4/0.1x4, smollm2 for those in the package, or a file with a line for each layer
            and its numbers between tabs. Requests may name a file only if the engine's rules do.
            The shape of the model must match: that of smollm2 is also that of SmolLM-135M.
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
        if read_numbers(self.scores) is None and _NUMBERS.fullmatch(self.scores):
            raise ConfigError(
                "budget duo: expected numbers of at most 9 digits before and after the point, such "
                f"as 0.9x4/0.1x4, got scores={self.scores}; write others into a file"
            )
        if not 0 < self.streaming <= 1:
            raise ConfigError(f"expected 0 < streaming <= 1, got {self.streaming}")

    @property
    def file(self) -> str:
        own = self.scores in PACKAGED or read_numbers(self.scores) is not None
        return "" if own else self.scores

    def lane_capacities(self, shape: Shape) -> tuple[int, ...] | None:
        numbers, (_, head_dim) = read_numbers(self.scores), PACKAGED.get(self.scores, ("", 0))
        rows = read_scores(self.scores) if numbers is None else [numbers]
        scores = [score for row in rows for score in row]
        fits, got = len(scores) == shape.num_lanes, f"{len(scores)}"
        if numbers is None:
            fits = [len(row) for row in rows] == [shape.heads] * shape.num_layers
            got += f" in {len(rows)} lines"
        if head_dim and shape.head_dim:
            fits &= head_dim == shape.head_dim
            got += f", for heads of {head_dim} elements instead of {shape.head_dim}"
        if not fits:
            raise ConfigError(
                f"budget duo: expected {shape.num_lanes} scores ({shape.num_layers} layers that "
                f"evict, with {shape.heads} KV heads), got {got}; measure this model with quire "
                "calibrate MODEL --retrieval-heads FILE"
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


PACKAGED = {"smollm2": ("retrieval_heads_smollm2.tsv", 64)}
"""Files of the package and elements of a head, by the name of their model."""


@lru_cache(maxsize=16)
def read_scores(source: str) -> tuple[tuple[float, ...], ...]:
    """Read the lines of a file of retrieval scores, in the package or elsewhere, once.

    Raises:
        ConfigError: it cannot be read, or it is not a table of finite numbers.
    """
    packaged, _ = PACKAGED.get(source, ("", 0))
    path = files("quire") / "assets" / packaged if packaged else Path(source)
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_FILE_CHARACTERS + 1)
        rows = tuple(tuple(map(float, line.split())) for line in text.splitlines() if line.strip())
        wrong = [score for row in rows for score in row if not isfinite(score)]
        if wrong or not rows:
            raise ValueError(f"expected finite numbers, got {wrong[0] if wrong else 'none'}")
        if len(text) > MAX_FILE_CHARACTERS:
            raise ValueError(f"it has more than {MAX_FILE_CHARACTERS:,} characters")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"budget duo: cannot read scores={source}: {error}; write the file with quire "
            "calibrate MODEL --retrieval-heads FILE"
        ) from error
    return rows
