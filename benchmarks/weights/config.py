"""Configurations of the weight codec benchmark, at full size and small."""

from dataclasses import dataclass, field

from benchmarks.common.workload import SHAPES
from benchmarks.eviction.config import TASKS, CellsConfig
from benchmarks.quant.config import TextsConfig
from quire.cli.options import WeightCodec
from quire.errors import ConfigError

PLAIN = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsBenchConfig:
    """Configuration of all parts.

    Attributes:
        model: evaluated model: a folder, a hub name or quire-tiny.
        codecs: weight codecs compared with the weights as stored.
        texts, tasks: configuration of the part quality.
        shape: a name in SHAPES; random weights of the parts random and decode.
        random_texts: configuration of the texts of the part random: random tokens.
        dtype: type of the random weights.
        rows: rows of a decode step in the part decode.
        repeats: rounds of all codecs in turn, after one warm-up round.
        steps: steps in each round.
    """

    model: str = "quire-tiny"
    codecs: tuple[WeightCodec, ...] = ("int8", "int4")
    texts: TextsConfig = field(default_factory=lambda: TextsConfig(codecs=()))
    tasks: CellsConfig = field(
        default_factory=lambda: CellsConfig(
            rules=(), budgets=(), tasks=TASKS, tokens=512, prompts=100
        )
    )
    shape: str = "125m"
    random_texts: TextsConfig = field(
        default_factory=lambda: TextsConfig(codecs=(), tokens=192, texts=4)
    )
    dtype: str = "bfloat16"
    rows: tuple[int, ...] = (1, 8)
    repeats: int = 5
    steps: int = 8

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise ConfigError(f"expected one of {', '.join(SHAPES)}, got {self.shape!r}")

    @property
    def all_codecs(self) -> tuple[str, ...]:
        """All codecs, the weights as stored first."""
        return (PLAIN, *self.codecs)


QUICK_WEIGHTS = WeightsBenchConfig(
    texts=TextsConfig(codecs=(), tokens=160, texts=2),
    tasks=CellsConfig(rules=(), budgets=(), tasks=("lines",), tokens=128, prompts=4),
    shape="tiny",
    random_texts=TextsConfig(codecs=(), tokens=96, texts=1),
    rows=(1,),
    repeats=2,
    steps=2,
)
"""For a run of seconds instead of minutes."""
