"""What `python -m benchmarks device` runs, at full size and small."""

from dataclasses import dataclass, field

from benchmarks.device.shapes import DecodeCase
from quire.profile.attention import AttentionShape

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBenchConfig:
    """All parts.

    Attributes:
        device: that is measured.
        pinned_bytes: of host memory, of the one pool that all parts use.
        repeats: of each measurement, behind one that is not counted.
        machine: of `benchmarks.offload.machines`, whose data sheet expectations are made of.
        copy_bytes: sizes of copies, of the part `link`.
        piece_bytes: sizes of small pieces there.
        pieces: of each size.
        product_models, product_tokens: of the part `products`.
        together: copies and products at a time, of the part `together`.
        cases: of the part `step`; the first also of `sweep` and `codes`.
        grouped: of the part `host`: a model whose activations do not pay.
        sweep_points: splits between none and all tokens.
        wires: KV and X as they cross the link, of the part `codes`.
        paged_bytes: swapped through scattered pages, of the part `swap`.
        swap_model, swap_tokens, chunk_tokens: of its sequences.
        host_attention: of one layer, of the part `host`.
        refit_case: of the part `refit`: one whose split moves when the link halves.
        refit_steps: before and behind the change of the link.
        accuracy_case: of the part `accuracy`.
        recompute_model, recompute_tokens: of its comparison through a model's own modules.
        folder: of the disk tier; a temporary one where it is empty.
        disk_bytes: written and read there.
    """

    device: str = "auto"
    pinned_bytes: int = 24 * GIB
    repeats: int = 5
    machine: str = "h200"
    copy_bytes: tuple[int, ...] = (
        *(4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB),
        *(256 * MIB, GIB),
    )
    piece_bytes: tuple[int, ...] = (4 * KIB, 16 * KIB, 28 * KIB, 64 * KIB, 256 * KIB)
    pieces: int = 1024
    product_models: tuple[str, ...] = ("OPT-6.7B", "OPT-13B", "OPT-30B", "Llama-3-8B")
    product_tokens: tuple[int, ...] = (64, *(1024 << n for n in range(8)))
    together: int = 20
    cases: tuple[DecodeCase, ...] = (
        DecodeCase(model="OPT-6.7B", rows=64, context=1024),
        DecodeCase(model="OPT-13B", rows=64, context=1024),
        DecodeCase(model="OPT-30B", rows=32, context=1024),
        DecodeCase(model="Llama-3-8B", rows=64, context=4096),
    )
    grouped: DecodeCase = field(
        default_factory=lambda: DecodeCase(model="Llama-3-8B", rows=64, context=4096)
    )
    sweep_points: int = 11
    wires: tuple[tuple[str, str], ...] = (
        ("plain", "plain"),
        ("int8", "plain"),
        ("int8", "int8"),
        ("int4", "int4"),
        ("plain", "int8"),
    )
    paged_bytes: int = 256 * MIB
    swap_model: str = "Llama-3-8B"
    swap_tokens: tuple[int, ...] = tuple(512 << n for n in range(7))
    chunk_tokens: int = 2048
    host_attention: AttentionShape = field(
        default_factory=lambda: AttentionShape(batch=64, tokens=4096)
    )
    refit_case: DecodeCase = field(
        default_factory=lambda: DecodeCase(model="OPT-30B", rows=32, context=1024)
    )
    refit_steps: int = 50
    accuracy_case: DecodeCase = field(
        default_factory=lambda: DecodeCase(model="OPT-6.7B", rows=8, context=512)
    )
    recompute_model: str = "llama_125m"
    recompute_tokens: int = 1024
    folder: str = ""
    disk_bytes: int = 2 * GIB


QUICK_DEVICE = DeviceBenchConfig(
    pinned_bytes=64 * MIB,
    repeats=2,
    copy_bytes=(4 * KIB, MIB),
    piece_bytes=(4 * KIB,),
    pieces=16,
    product_models=("toy", "toy-grouped"),
    product_tokens=(64, 256),
    together=4,
    cases=(
        DecodeCase(model="toy", rows=4, context=64),
        DecodeCase(model="toy-grouped", rows=4, context=64),
    ),
    grouped=DecodeCase(model="toy-grouped", rows=4, context=64),
    sweep_points=3,
    wires=(("plain", "plain"), ("int8", "int8")),
    paged_bytes=256 * KIB,
    swap_model="toy",
    swap_tokens=(32, 64),
    chunk_tokens=16,
    host_attention=AttentionShape(batch=2, tokens=64, num_heads=4, num_kv_heads=2, head_dim=64),
    refit_case=DecodeCase(model="toy", rows=4, context=64),
    refit_steps=4,
    accuracy_case=DecodeCase(model="toy", rows=4, context=32),
    recompute_model="llama_tiny",
    recompute_tokens=32,
    disk_bytes=4 * MIB,
)
