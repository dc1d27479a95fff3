"""M10: how far recomputed keys and values are from stored ones, what that changes; the disk's rate.

Stored KV comes of products over all tokens at once, recomputed KV of smaller ones, which may add up
in another order; both are rounded to bfloat16.
"""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.common.result import Cell, Numbers, PartResult, Table
from benchmarks.device.bench import DeviceBench
from benchmarks.device.offloaded_model import OffloadedModel
from benchmarks.device.recomputed_kv import recompute_errors, relative
from benchmarks.device.step_harness import StepHarness
from benchmarks.offload.arms import BY_NAME
from quire.errors import ConfigError
from quire.offload.tiers.disk import DiskTier
from quire.profile.timing import seconds, touched_buffer

_PIECES = 24  # of a layer's tokens, as many as a ring has at most
_LOGITS = 4096  # of a random head
_MIB = 1 << 20


def run_accuracy(bench: DeviceBench) -> PartResult:
    """The part."""
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
    """The largest of all layers.

    accuracy_remade: KV recomputed in pieces, against the stored one.
    accuracy_stored, accuracy_pieces: either against the product in float32.
    """
    found: Numbers = {"accuracy_remade": 0.0, "accuracy_stored": 0.0, "accuracy_pieces": 0.0}
    for number in range(model.distinct):
        x, stored = model.activations(number), model.plain_kv(number)
        pieces = torch.empty_like(stored)
        for part, into in zip(x.chunk(_PIECES), pieces.chunk(_PIECES), strict=True):
            model.layer(number).project(part, into)
        exact = x.float() @ model.layer(number).kv.float()
        errors = (relative(pieces, stored), relative(stored, exact), relative(pieces, exact))
        found = {name: max(found[name], e) for name, e in zip(found, errors, strict=True)}
    return found


def logit_errors(harness: StepHarness) -> Numbers:
    """A step with half of its KV recomputed against one with all of it carried.

    accuracy_logits: norm of the difference, relative. accuracy_logits_largest: of all logits.
    accuracy_same_token: share of rows whose largest logit is the same.
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
    transferred, made = logits
    return {
        "accuracy_logits": relative(made, transferred),
        "accuracy_logits_largest": float((made - transferred).abs().max()),
        "accuracy_same_token": float((made.argmax(1) == transferred.argmax(1)).float().mean()),
    }


def disk_rates(folder: str, num_bytes: int, repeats: int) -> Numbers:
    """disk_*_gb_per_s: of one large entry, flushed when it is written, sums checked when read.

    Raises:
        ConfigError: the disk has not twice the room.
    """
    with _folder(folder) as place:
        free_bytes = shutil.disk_usage(place).free
        if 2 * num_bytes > free_bytes:
            raise ConfigError(
                f"expected {2 * num_bytes:,} B free for the disk tier, got {free_bytes:,} B; name "
                "another --folder"
            )
        tier = DiskTier(place, 2 * num_bytes)
        try:
            return _disk(tier, num_bytes, repeats)
        finally:
            tier.drop("entry")
            tier.close()


def _disk(tier: DiskTier, num_bytes: int, repeats: int) -> Numbers:
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
    """A folder of its own inside the one named, gone afterwards."""
    if name and not Path(name).is_dir():
        raise ConfigError(f"expected an existing --folder for the disk tier, got {name!r}")
    with tempfile.TemporaryDirectory(dir=name or None) as place:
        yield Path(place)


def _table(bench: DeviceBench, harness: StepHarness, found: Numbers) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (name.removeprefix("accuracy_").replace("_", " "), value) for name, value in found.items()
    ]
    return Table(
        name="device-accuracy",
        caption=(
            f"{bench.where} {harness.case.label} in {harness.case.dtype}: recomputed KV against "
            "stored KV, both against float32, and logits of a step. Modules: a model's own, "
            "rotations included. Expected: at most 4e-3 in bfloat16."
        ),
        columns=("what", "error"),
        rows=tuple(rows),
    )


def _disk_table(bench: DeviceBench, found: Numbers) -> Table:
    past = "past the page cache" if found["disk_past_page_cache"] else "through the page cache"
    return Table(
        name="device-disk",
        caption=(
            f"The disk tier, {bench.config.disk_bytes // _MIB:,} MiB in blocks of 1 MiB, {past}, "
            "with sums. Nothing is expected: it depends on the machine."
        ),
        columns=("write, GB/s", "read, GB/s"),
        rows=((found["disk_write_gb_per_s"], found["disk_read_gb_per_s"]),),
    )
