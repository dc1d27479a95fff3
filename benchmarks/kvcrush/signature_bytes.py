"""Part `bytes`: signatures beside the keys that they stand for, by arithmetic.

A token's signature has one bit for each query head of its layer, its keys head_dim numbers for each
KV head. The paper holds the signature against the key of one head: 32 bits against 128 numbers of
16 bits are 64 times less.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.common.result import Numbers, PartResult, Table

WORD_BYTES = 8
NUMBER_BYTES = 4  # what is remembered of slots is float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A layer.

    Attributes:
        name: of the model.
        heads: query heads.
        kv_heads: KV heads.
        head_dim: numbers of a head's key.
        number_bytes: of each of them.
    """

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    number_bytes: int = 2

    @property
    def key_bits(self) -> int:
        """Of one head's key."""
        return 8 * self.number_bytes * self.head_dim

    @property
    def all_keys_bits(self) -> int:
        """Of a token's keys in the layer."""
        return self.kv_heads * self.key_bits

    @property
    def packed_bytes(self) -> int:
        """Of a signature while it is used: whole words."""
        return -(-self.heads // (8 * WORD_BYTES)) * WORD_BYTES

    @property
    def kept_bytes(self) -> int:
        """Of a signature with `signatures=stored`: one number for each KV head."""
        return self.kv_heads * NUMBER_BYTES


PAPER = Shape(name="Llama-3-8B (paper)", heads=32, kv_heads=8, head_dim=128)
SHAPES = (
    PAPER,
    Shape(name="Llama-2-7B", heads=32, kv_heads=32, head_dim=128),
    Shape(name="Llama-3-70B", heads=64, kv_heads=8, head_dim=128),
    Shape(name="Qwen3-0.6B", heads=16, kv_heads=8, head_dim=128),
)


def run_bytes(shapes: Sequence[Shape] = SHAPES) -> PartResult:
    """The part."""
    return PartResult(
        claims=claims(), tables=(_table(shapes),), raw={"shapes": [s.name for s in shapes]}
    )


def claims() -> Numbers:
    """Key bits over signature bits: of one head, as in the paper, and of all KV heads."""
    return {
        "key_bits_over_signature_bits": PAPER.key_bits // PAPER.heads,
        "all_keys_bits_over_signature_bits": PAPER.all_keys_bits // PAPER.heads,
    }


def _table(shapes: Sequence[Shape]) -> Table:
    return Table(
        name="kvcrush-bytes",
        caption=(
            "A token of a layer: bits of its signature against those of its keys. In words: as it "
            "is compared; stored: of a slot with signatures=stored."
        ),
        columns=(
            "model",
            "signature bits",
            "one key bits",
            "times",
            "all keys bits",
            "times all",
            "in words B",
            "stored B",
        ),
        rows=tuple(_row(shape) for shape in shapes),
    )


def _row(shape: Shape) -> tuple[str | int | float, ...]:
    one, everything = shape.key_bits, shape.all_keys_bits
    times = one / shape.heads, everything / shape.heads
    return (
        shape.name,
        shape.heads,
        one,
        times[0],
        everything,
        times[1],
        shape.packed_bytes,
        shape.kept_bytes,
    )
