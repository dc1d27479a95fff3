"""Configurations of `python -m benchmarks device`, at full size and small."""

from dataclasses import dataclass, field

from benchmarks.device.shapes import DecodeCase
from quire.profile.ceilings import AttentionShape

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBenchConfig:
    """Configuration of all parts.

    Attributes:
        device: the measured device.
        pinned_bytes: size of the pinned host memory pool that all parts use.
        repeats: repeats of each measurement, after one warm-up that is not counted.
        machine: name in `benchmarks.offload.machines`; its data sheet gives the expected values.
        copy_bytes: sizes of copies in the part `link`.
        piece_bytes: sizes of small copies in the part `link`.
        pieces: number of small copies of each size.
        product_models, product_tokens: models and token counts of the part `products`.
        together: concurrent copies and products of the part `together`.
        cases: cases of the part `step`; `sweep` and `codes` use the first.
        grouped: model of the part `host` for which recompute from activations does not pay.
        sweep_points: number of splits between none and all tokens.
        wires: link codecs of KV and X in the part `codes`.
        paged_bytes: bytes swapped through scattered pages in the part `swap`.
        swap_model, swap_tokens, chunk_tokens: model, lengths and chunk size of the part `swap`.
        host_attention: CPU attention of one layer in the part `host`.
        refit_case: case of the part `refit`; its split changes when the link rate halves.
        refit_steps: steps before and after the change of the link.
        accuracy_case: case of the part `accuracy`.
        recompute_model, recompute_tokens: model and length of its recompute comparison, which uses
            the model's own modules.
        folder: folder of the disk tier; if empty, a temporary folder.
        disk_bytes: bytes written to and read from the disk tier.
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
