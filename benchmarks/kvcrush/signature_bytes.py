"""Part `bytes`: computed sizes of signatures and of the keys that they represent.

A token's signature has one bit per query head of its layer; its keys have head_dim elements per KV
head. The paper compares the signature with the key of one head: 32 bits are 1/64 of 128 elements of
16 bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.common.result import Numbers, PartResult, Table

WORD_BYTES = 8
NUMBER_BYTES = 4  # slot statistics are float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Shape of a layer.

    Attributes:
        name: name of the model.
        heads: query heads.
        kv_heads: KV heads.
        head_dim: elements of a head's key.
        number_bytes: bytes of an element.
    """

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    number_bytes: int = 2

    @property
    def key_bits(self) -> int:
        """Bits of one head's key."""
        return 8 * self.number_bytes * self.head_dim

    @property
    def all_keys_bits(self) -> int:
        """Bits of a token's keys in the layer."""
        return self.kv_heads * self.key_bits

    @property
    def packed_bytes(self) -> int:
        """Bytes of a signature in use, in whole words."""
        return -(-self.heads // (8 * WORD_BYTES)) * WORD_BYTES

    @property
    def stored_bytes(self) -> int:
        """Bytes of a signature with `signatures=stored`: one number per KV head."""
        return self.kv_heads * NUMBER_BYTES


PAPER = Shape(name="Llama-3-8B (paper)", heads=32, kv_heads=8, head_dim=128)
SHAPES = (
    PAPER,
    Shape(name="Llama-2-7B", heads=32, kv_heads=32, head_dim=128),
    Shape(name="Llama-3-70B", heads=64, kv_heads=8, head_dim=128),
    Shape(name="Qwen3-0.6B", heads=16, kv_heads=8, head_dim=128),
)


def run_bytes(shapes: Sequence[Shape] = SHAPES) -> PartResult:
    """Run the part."""
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
            "A token of a layer: bits of its signature and of its keys. In words: the signature "
            "in use; stored: bytes per slot with signatures=stored."
        ),
        columns=(
            "model",
            "signature bits",
            "one key bits",
            "ratio to one key",
            "all keys bits",
            "ratio to all keys",
            "in words B",
            "stored B",
        ),
        rows=tuple(_row(shape) for shape in shapes),
    )


def _row(shape: Shape) -> tuple[str | int | float, ...]:
    one_key, all_keys = shape.key_bits, shape.all_keys_bits
    ratios = one_key / shape.heads, all_keys / shape.heads
    return (
        shape.name,
        shape.heads,
        one_key,
        ratios[0],
        all_keys,
        ratios[1],
        shape.packed_bytes,
        shape.stored_bytes,
    )
