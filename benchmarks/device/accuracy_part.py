"""M10: difference between recomputed and stored KV and its effect on logits; disk rates.

Stored KV is computed by products over all tokens, recomputed KV by smaller products, which may sum
in another order; both are rounded to bfloat16.

A whole model recomputes its keys and values with its own modules, as the engine's decoder does.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.common.models import llama_125m, llama_tiny, random_weights
from benchmarks.common.offloaded_model import OffloadedModel
from benchmarks.common.result import Cell, Numbers, PartResult, Table
from benchmarks.common.target import Target
from benchmarks.device.bench import DeviceBench
from benchmarks.device.step_harness import StepHarness
from benchmarks.offload.arms import BY_NAME
from quire.errors import ConfigError
from quire.kernels.backend import AttentionMath
from quire.kernels.dense import attend_dense
from quire.models.adapter import TransformersDecoder
from quire.models.base import AttentionCall
from quire.offload.tiers.file import FileTier
from quire.profile.ceilings import seconds, touched_buffer

_CHUNKS = 24  # chunks of a layer's tokens, as many as an X ring has at most
_LOGITS = 4096  # outputs of a random head
_MIB = 1 << 20


def run_accuracy(bench: DeviceBench) -> PartResult:
    """Run the part."""
    config = bench.config
    harness = bench.harness(config.accuracy_case)
    layer = layer_errors(harness.model)
    logits = logit_errors(harness)
    model = recompute_errors(bench.target, config.recompute_model, config.recompute_tokens)
    modules = {f"accuracy_modules_{name}": error for name, error in model.items()}
    disk = disk_rates(config.folder, config.disk_bytes, config.repeats)
    return PartResult(
        claims=layer | logits | modules | disk,
        tables=(_table(bench, harness, layer | logits | modules), _disk_table(bench, disk)),
    )


def layer_errors(model: OffloadedModel) -> Numbers:
    """Largest error over all layers.

    accuracy_remade: KV recomputed in chunks, compared with stored KV.
    accuracy_stored, accuracy_pieces: stored and recomputed KV, compared with float32 products.
    """
    found: Numbers = {"accuracy_remade": 0.0, "accuracy_stored": 0.0, "accuracy_pieces": 0.0}
    for number in range(model.distinct):
        x, stored = model.activations(number), model.plain_kv(number)
        chunks = torch.empty_like(stored)
        for part, into in zip(x.chunk(_CHUNKS), chunks.chunk(_CHUNKS), strict=True):
            model.layer(number).project(part, into)
        exact = x.float() @ model.layer(number).kv.float()
        errors = (relative(chunks, stored), relative(stored, exact), relative(chunks, exact))
        found = {name: max(found[name], e) for name, e in zip(found, errors, strict=True)}
    return found


def logit_errors(harness: StepHarness) -> Numbers:
    """Compare a step that recomputes half of its KV with a step that transfers all of it.

    accuracy_logits: relative norm of the difference of the logits. accuracy_logits_largest: the
    largest absolute difference. accuracy_same_token: fraction of rows with the same top token.
    """
    draw = torch.Generator(harness.target.device)
    draw.manual_seed(1)
    hidden = harness.case.spec.hidden_size
    head = torch.randn(hidden, _LOGITS, generator=draw, device=harness.target.device)
    head *= hidden**-0.5
    logits: list[Tensor] = []
    half = harness.case.tokens // 2 * harness.model.with_x
    for layout in (harness.layout(BY_NAME["prefetch"]), harness.split_layout(half)):
        harness.run(layout)
        logits.append(harness.hidden.float() @ head)
    transferred, recomputed = logits
    return {
        "accuracy_logits": relative(recomputed, transferred),
        "accuracy_logits_largest": float((recomputed - transferred).abs().max()),
        "accuracy_same_token": float(
            (recomputed.argmax(1) == transferred.argmax(1)).float().mean()
        ),
    }


def disk_rates(folder: str, num_bytes: int, repeats: int) -> Numbers:
    """disk_*_gb_per_s: rates of one large entry, flushed after writing, with checked checksums.

    Raises:
        ConfigError: the disk has too little free space.
    """
    with _folder(folder) as path:
        free_bytes = shutil.disk_usage(path).free
        if 2 * num_bytes > free_bytes:
            raise ConfigError(
                f"expected {2 * num_bytes:,} B free for the disk tier, got {free_bytes:,} B; use "
                "another --folder"
            )
        tier = FileTier(path, 2 * num_bytes)
        try:
            return _disk(tier, num_bytes, repeats)
        finally:
            tier.drop("entry")
            tier.close()


def _disk(tier: FileTier, num_bytes: int, repeats: int) -> Numbers:
    source, into = (touched_buffer(num_bytes).numpy().data for _ in range(2))
    write_s = min(seconds(lambda: tier.write("entry", source)) for _ in range(repeats))
    read_s = min(seconds(lambda: tier.read("entry", into)) for _ in range(repeats))
    return {
        "disk_write_gb_per_s": num_bytes / write_s / 1e9,
        "disk_read_gb_per_s": num_bytes / read_s / 1e9,
        "disk_past_page_cache": int(tier.direct),
    }


@contextmanager
def _folder(name: str) -> Iterator[Path]:
    """A temporary folder inside the given folder, deleted at exit."""
    if name and not Path(name).is_dir():
        raise ConfigError(f"expected an existing --folder for the disk tier, got {name!r}")
    with tempfile.TemporaryDirectory(dir=name or None) as path:
        yield Path(path)


def _table(bench: DeviceBench, harness: StepHarness, found: Numbers) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (name.removeprefix("accuracy_").replace("_", " "), value) for name, value in found.items()
    ]
    return Table(
        name="device-accuracy",
        caption=(
            f"{bench.where} {harness.case.label} in {harness.case.dtype}: recomputed and stored "
            "KV, each compared with the other and with float32, and logits of a step. Modules: a "
            "model's own, with RoPE. Expected: at most 4e-3 in bfloat16."
        ),
        columns=("what", "error"),
        rows=tuple(rows),
    )


def _disk_table(bench: DeviceBench, found: Numbers) -> Table:
    page_cache = "bypassed" if found["disk_past_page_cache"] else "used"
    return Table(
        name="device-disk",
        caption=(
            f"The disk tier, {bench.config.disk_bytes // _MIB:,} MiB in blocks of 1 MiB, page "
            f"cache {page_cache}, with checksums. No expected value: rates depend on the machine."
        ),
        columns=("write, GB/s", "read, GB/s"),
        rows=((found["disk_write_gb_per_s"], found["disk_read_gb_per_s"]),),
    )


CONFIGS: Mapping[str, Callable[[], object]] = {"llama_125m": llama_125m, "llama_tiny": llama_tiny}


@dataclass(slots=True)
class _StoringAttention:
    """Attention over one prompt that stores each layer's inputs, keys and values."""

    wants_inputs: bool = True
    inputs: dict[int, Tensor] = field(default_factory=dict)
    stored: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def note_input(self, layer: int, inputs: Tensor) -> None:
        self.inputs[layer] = inputs.clone()

    def attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `PagedAttention.attend`."""
        self.stored[call.layer] = key.clone(), value.clone()
        heads = (part.transpose(0, 1)[None] for part in (query, key, value))
        out = attend_dense(*heads, math=AttentionMath(call.scale), seen=None, causal=True)
        return out[0].transpose(0, 1).contiguous()


def recompute_errors(target: Target, model: str, tokens: int) -> dict[str, float]:
    """Error of keys and values recomputed from activations, compared with stored ones, in bfloat16.

    Half of the tokens are recomputed, so that the products have another shape than during prefill.


    Args:
        target: the device.
        model: name in `CONFIGS`.
        tokens: tokens of the prompt.

    Returns:
        `key` and `value`: the largest relative norm of the difference over all layers.

    Raises:
        ConfigError: the model's modules do not support recompute.
    """
    weights = random_weights(CONFIGS[model](), dtype=torch.bfloat16)  # type: ignore[arg-type]
    torch.nn.Module.to(weights, target.device)
    decoder = TransformersDecoder(weights)
    why_not = decoder.prepare_recomputation()
    if why_not is not None:
        raise ConfigError(f"{model} cannot be recomputed: {why_not}")
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(2, decoder.spec.vocab_size, (tokens,), generator=draw).to(target.device)
    positions = torch.arange(tokens, device=target.device)
    storing = _StoringAttention()
    decoder.forward(ids, positions, positions[-1:], storing)
    half = positions[::2]
    errors: dict[str, float] = {"key": 0.0, "value": 0.0}
    for layer, stored in storing.stored.items():
        recomputed = decoder.keys_and_values(layer, storing.inputs[layer][half], half)
        for name, found, expected in zip(errors, recomputed, stored, strict=True):
            errors[name] = max(errors[name], relative(found, expected[half]))
    return errors


def relative(found: Tensor, expected: Tensor) -> float:
    """||found - expected|| / ||expected||."""
    difference = (found.float() - expected.float()).norm()
    return float(difference / expected.float().norm())
