"""Computes the memory plan of `quire plan` from a model folder and options."""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from quire.cli.common import model_config
from quire.cli.report import total_memory_bytes
from quire.errors import ConfigError, UnknownName
from quire.layout.config import ConfigReader, check_sizes, dtype_bytes
from quire.layout.kv_format import fill_plain, read_format
from quire.layout.layout import layout_for
from quire.layout.limits import refuse_model_type
from quire.layout.model import HeadShape, ModelSpec
from quire.layout.pages import CacheLayout
from quire.layout.sizes import format_size, option_size, rounded_size
from quire.layout.sparse import OFF, parse_sparse, refuse_sparse
from quire.plan.capacity import (
    DEFAULT_HEADROOM_SHARE,
    WEIGHT_BITS,
    Capacity,
    CapacityVerdict,
    LayerKind,
    MemoryLayout,
    Workload,
    assess,
    auto_kv_memory,
    bytes_per_value,
    capacity,
    coded_weight_bytes,
    estimate_activation_peak,
    estimate_process,
    layer_kinds,
    sequence_bytes,
    sparse_read_share,
    state_bytes,
    token_bytes,
)
from quire.plan.machine import free_host_bytes
from quire.plan.roofline import DecodeStep, crossover_batch, decode_step
from quire.plan.weights import WeightsPlacement, planned_weights
from quire.scheduler.schedule_config import ScheduleConfig

Quality = Mapping[str, Mapping[str, float]]
"""Quality, full KV = 1, by KV codec and by the name of the retained share."""

RETAINED = {"all tokens": 1.0, "50%": 0.5, "25%": 0.25}
DEVICES = ("cpu", "cuda")
STEP_TOKENS: int = {f.name: f.default for f in fields(ScheduleConfig)}["max_num_batched_tokens"]  # type: ignore[assignment]
_USUAL_SEQUENCE_TOKENS = 2048
_TOKEN_ID_BYTES = 8  # stored with the KV of a token


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Options of `quire plan`."""

    memory_bytes: int | None = None  # None: memory of this machine
    kv_memory_bytes: int | None = None  # None: all remaining memory
    disk_kv_bytes: int = 0  # for cached prefixes
    headroom_bytes: int | None = None  # None: 10% of the memory
    dtype: str = "auto"  # "auto": dtype of config.json
    weight_codec: str = "auto"  # int8 or int4; "auto": none
    kv_codec: str | None = None  # None: dtype of the weights
    page_tokens: int = 16
    sparse: str = OFF  # pages that a decode step reads
    sequence_tokens: int | None = None  # None: 2048 or the model's context
    batch: int = 8  # sequences, and rows sampled in a step
    max_num_batched_tokens: int = STEP_TOKENS
    activation_peak_bytes: int | None = None  # None: estimated
    workload: Workload | None = None
    weights_memory_bytes: int | None = None  # None: no weight offload
    device: str = "cpu"  # cpu or cuda

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise UnknownName("device", self.device, DEVICES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What the memory holds with one codec of weights and one of KV."""

    weight_codec: str  # or the dtype of the weights
    kv_codec: str
    kv_bytes: int  # of the KV memory; 0: nothing fits
    tokens: int | None  # with all tokens retained; None: tokens need no memory
    sequences: dict[str, int]  # that decode at once, by the share of tokens that eviction retains


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """The result of `quire plan`."""

    model_name: str
    model: ModelSpec
    dtype: str
    weight_codec: str
    kv_codec: str
    batch: int  # sequences
    memory: MemoryLayout
    capacity: Capacity
    kv_bytes_per_token: int  # of all layers, before sliding windows and chunks are full
    state_bytes: int  # of the recurrent states of a sequence
    kinds: dict[str, LayerKind]
    disk_kv_bytes: int  # for cached prefixes
    sparse: str  # pages that a decode step reads; empty: all
    sparse_share: float  # bytes of pages and bounds that a decode step reads, over all KV bytes
    step: DecodeStep  # bytes read by a decode step of the batch
    crossover_batch: int  # smallest batch whose KV reads exceed the weight reads
    verdict: CapacityVerdict | None  # None without a workload
    weights: WeightsPlacement
    choices: tuple[Choice, ...]
    fit: str  # whether the batch fits, and what to change
    free_bytes: int | None  # of this machine; None: another memory was planned

    @property
    def shown_memory(self) -> MemoryLayout:
        """The memory with the KV memory of whole slabs, which a server shows too."""
        return replace(self.memory, kv_bytes=self.capacity.pool_bytes)

    @property
    def disk_tokens(self) -> int:
        return self.disk_kv_bytes // (self.kv_bytes_per_token + _TOKEN_ID_BYTES)

    @property
    def saved_bytes_per_token(self) -> int:
        """Bytes that layers without KV of their own would store."""
        return sum(kind.saved_bytes_per_token for kind in self.kinds.values())

    def claims(self) -> dict[str, int | float]:
        numbers: dict[str, int | float] = {
            "num_parameters": self.model.num_parameters,
            "process_bytes": self.memory.process_bytes,
            "weights_bytes": self.memory.weights_bytes,
            "offloaded_weight_bytes": self.weights.host_bytes,
            "activation_peak_bytes": self.memory.activation_peak_bytes,
            "headroom_bytes": self.memory.headroom_bytes,
            "kv_memory_bytes": self.capacity.pool_bytes,
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "kv_bytes_per_token_saved_by_sharing": self.saved_bytes_per_token,
            "state_bytes_per_sequence": self.state_bytes,
            "disk_tokens": self.disk_tokens,
            "page_bytes": self.capacity.page_bytes,
            "pool_pages": self.capacity.pool_pages,
            "pages_per_sequence": self.capacity.pages_per_sequence,
            "sequences": self.capacity.sequences,
            "longest_tokens": self.capacity.longest_tokens,
            "crossover_batch": self.crossover_batch,
            "kv_read_share": self.step.kv_share,
            "sparse_read_share": self.sparse_share,
        }
        if self.verdict is not None:
            numbers["workload_kv_bytes"] = self.verdict.kv_bytes
            numbers["workload_kv_share"] = self.verdict.kv_share
            numbers["workload_sequences"] = self.verdict.sequences
            numbers["workload_decode_share"] = self.verdict.decode_share
        return numbers

    def arms(self) -> dict[str, object]:
        return {
            "memory": asdict(self.memory),
            "capacity": asdict(self.capacity),
            "decode_step": asdict(self.step),
            "kinds": {name: asdict(kind) for name, kind in self.kinds.items()},
            "choices": [asdict(choice) for choice in self.choices],
            "workload": None if self.verdict is None else asdict(self.verdict),
        }


def plan_report(
    model_folder: Path, options: PlanOptions | None = None, *, name: str | None = None
) -> PlanReport:
    """Plan a model's memory from its config.json or GGUF file; no weights are read."""
    options = options or PlanOptions()
    if options.max_num_batched_tokens < 1:
        raise ConfigError(
            f"max_num_batched_tokens={options.max_num_batched_tokens}: expected 1 or more"
        )
    config = model_config(model_folder)
    refuse_model_type(str(config.get("model_type")))
    check_sizes(config)
    model = ModelSpec.from_config(config)
    dtype = _resolve_dtype(options.dtype, config)
    kv_codec = dtype if options.kv_codec is None else options.kv_codec
    kv_codec = fill_plain(kv_codec, dtype, latent=model.latent is not None)
    sparse = parse_sparse(options.sparse)
    if sparse is not None:
        refuse_sparse(model, kv_codec, sparse)
    layout, plain = (
        layout_for(
            model,
            page_tokens=options.page_tokens,
            codec=kv_codec,
            # mixed precision (promoted tokens) exists only with eviction
            evicting=read_format(kv_codec).promoted is not None,
            bounds=bounds,
        )
        for bounds in (sparse is not None, False)
    )
    weight_bytes_per_value = _weight_bytes(model, options, dtype) / model.num_parameters
    weights = planned_weights(model, weight_bytes_per_value, options.weights_memory_bytes)
    tokens = options.sequence_tokens
    if tokens is None:
        tokens = min(_USUAL_SEQUENCE_TOKENS, model.max_positions)
    read_share = 1.0 if sparse is None else sparse_read_share(layout, plain, sparse, tokens)
    read_bytes_per_value = read_share * bytes_per_value(model, plain)
    choices = tuple(_choices(model, options, dtype, tokens))
    try:
        memory = _divide(model, options, dtype_bytes(dtype), weights.device_bytes)
    except ConfigError as error:
        # the first codec that fits loses the least
        found = next((choice for choice in choices if choice.kv_bytes), None)
        if found is not None and options.kv_memory_bytes is not None:
            change = f"it fits with --weight-codec {found.weight_codec}"
        elif found is not None:
            change = (
                f"--weight-codec {found.weight_codec} leaves {format_size(found.kv_bytes)} for KV"
            )
        else:
            kv_bytes = options.kv_memory_bytes or sequence_bytes(layout, tokens)
            least = _min_memory(model, options, dtype, kv_bytes)
            change = f"{format_size(kv_bytes)} of KV need {least}"
        raise ConfigError(f"{error}; {change}") from error
    fits = capacity(
        model, memory.kv_bytes, layout=layout, sequence_tokens=tokens, batch=options.batch
    )
    return PlanReport(
        model_name=name or model_folder.resolve().name,
        model=model,
        dtype=dtype,
        weight_codec=options.weight_codec,
        kv_codec=kv_codec,
        batch=options.batch,
        memory=memory,
        capacity=fits,
        kv_bytes_per_token=math.ceil(token_bytes(layout)),
        state_bytes=state_bytes(layout),
        kinds=layer_kinds(layout),
        disk_kv_bytes=options.disk_kv_bytes,
        sparse="" if sparse is None else sparse.text,
        sparse_share=read_share,
        step=decode_step(
            model,
            batch=options.batch,
            tokens=tokens,
            weight_bytes_per_value=weight_bytes_per_value,
            kv_bytes_per_value=read_bytes_per_value,
            state_bytes=state_bytes(layout),
        ),
        crossover_batch=crossover_batch(
            model,
            tokens=tokens,
            weight_bytes_per_value=weight_bytes_per_value,
            kv_bytes_per_value=read_bytes_per_value,
            state_bytes=state_bytes(layout),
        ),
        verdict=_verdict(model, memory, layout, options.workload, weights),
        weights=weights,
        choices=choices,
        fit=_fit(model, fits, layout, options, memory, partial(_memory_for, model, options, dtype)),
        free_bytes=free_host_bytes() if options.memory_bytes is None else None,
    )


def _fit(
    model: ModelSpec,
    found: Capacity,
    layout: CacheLayout,
    options: PlanOptions,
    memory: MemoryLayout,
    memory_for: Callable[[int], int],
) -> str:
    """Whether the batch fits, and what to change if it does not.

    `memory_for` returns the bytes of a device that leave a number of bytes for KV.
    """
    if found.limit != "memory":
        return "fits" if found.limit == "none" else ""
    tokens = found.sequence_tokens
    smallest = rounded_size(options.batch * sequence_bytes(layout, tokens))
    unit = rounded_size(smallest + 1) - smallest

    def fits(kv_bytes: int) -> bool:
        held = capacity(model, kv_bytes, layout=layout, sequence_tokens=tokens, batch=options.batch)
        return held.limit == "none"

    # some bytes are lost at the borders of slabs
    sizes = range(smallest, 4 * smallest, unit)
    needed = rounded_size(sizes[bisect_left(sizes, True, key=fits)])
    raised = []
    if options.kv_memory_bytes is not None:
        raised.append(f"--kv-memory to {option_size(needed)}")
    if needed > memory.kv_bytes + memory.unassigned_bytes:
        raised.append(f"--memory to {option_size(rounded_size(memory_for(needed)))}")
    lowered = "--batch or --sequence-tokens" if options.batch > 1 else "--sequence-tokens"
    return f"does not fit: raise {' and '.join(raised)}, or lower {lowered}"


def _choices(
    model: ModelSpec, options: PlanOptions, dtype: str, sequence_tokens: int
) -> Iterator[Choice]:
    """The capacity of the memory with each codec of weights and of KV that the model can use.

    Recurrent states have the planned codec in all of them.
    """
    planned_codec = fill_plain(options.kv_codec or dtype, dtype, latent=model.latent is not None)
    planned_states = read_format(planned_codec).states
    states = "" if planned_states is None else f"+states={planned_states.name}"
    for weight_codec in _weight_codecs(options):
        planned = replace(options, weight_codec=weight_codec)
        bytes_per_weight = _weight_bytes(model, planned, dtype) / model.num_parameters
        weights = planned_weights(model, bytes_per_weight, options.weights_memory_bytes)
        for kv_codec in (dtype, "int8", "int4"):
            try:
                layouts = {
                    name: layout_for(
                        model,
                        page_tokens=options.page_tokens,
                        codec=fill_plain(kv_codec + states, dtype, latent=model.latent is not None),
                        evicting=share < 1,
                        bounds=parse_sparse(options.sparse) is not None,
                    )
                    for name, share in RETAINED.items()
                }
            except ConfigError:  # for example a head_dim that int4 cannot halve
                continue
            kv_bytes, sequences = 0, dict.fromkeys(RETAINED, 0)
            tokens: int | None = 0
            with suppress(ConfigError):  # it does not fit
                memory = _divide(model, planned, dtype_bytes(dtype), weights.device_bytes)
                held = {
                    name: capacity(
                        model,
                        memory.kv_bytes,
                        layout=layouts[name],
                        sequence_tokens=sequence_tokens,
                        batch=options.batch,
                        retained=None if share == 1 else math.ceil(share * sequence_tokens),
                    )
                    for name, share in RETAINED.items()
                }
                sequences = {name: found.sequences for name, found in held.items()}
                whole = next(iter(held.values()))
                kv_bytes, tokens = whole.pool_bytes, whole.pool_tokens
            yield Choice(
                weight_codec=dtype if weight_codec == "auto" else weight_codec,
                kv_codec=kv_codec,
                kv_bytes=kv_bytes,
                tokens=tokens,
                sequences=sequences,
            )


def _resolve_dtype(dtype: str, config: dict[str, object]) -> str:
    dtype = (ConfigReader(config).dtype() or "float32") if dtype == "auto" else dtype
    dtype_bytes(dtype)
    return dtype


def _weight_bytes(model: ModelSpec, options: PlanOptions, dtype: str) -> int:
    codec = options.weight_codec
    if codec == "auto":
        return model.weight_bytes(dtype_bytes(dtype))
    if codec not in WEIGHT_BITS:
        raise UnknownName("weight-codec", codec, ["auto", *WEIGHT_BITS])
    if options.device != "cpu":
        raise ConfigError(f"weight-codec={codec}: quantized weights run on a CPU; use --device cpu")
    if options.weights_memory_bytes is not None:
        raise ConfigError(
            f"weight-codec={codec}: offloaded layers are copied as they are stored; use "
            "--weights-memory all"
        )
    return coded_weight_bytes(model, codec, dtype_bytes(dtype))


def _divide(
    model: ModelSpec, options: PlanOptions, bytes_per_value: int, weights_bytes: int
) -> MemoryLayout:
    total_bytes = total_memory_bytes() if options.memory_bytes is None else options.memory_bytes
    if total_bytes < 1:
        raise ConfigError("memory=0 B: expected the memory of a device")
    headroom_bytes = options.headroom_bytes
    if headroom_bytes is None:
        headroom_bytes = int(total_bytes * DEFAULT_HEADROOM_SHARE)
    process_bytes, peak_bytes = _run_bytes(model, options, bytes_per_value)
    kv_bytes = options.kv_memory_bytes
    if kv_bytes is None:
        kv_bytes = auto_kv_memory(
            total_bytes,
            weights_bytes,
            peak_bytes,
            headroom_bytes,
            process_bytes,
            weight_codec=options.weight_codec,
        )
    return MemoryLayout(
        total_bytes=total_bytes,
        weights_bytes=weights_bytes,
        activation_peak_bytes=peak_bytes,
        headroom_bytes=headroom_bytes,
        kv_bytes=kv_bytes,
        process_bytes=process_bytes,
    )


def _run_bytes(model: ModelSpec, options: PlanOptions, bytes_per_value: int) -> tuple[int, int]:
    """Bytes of the process and of activations."""
    peak_bytes = options.activation_peak_bytes
    if peak_bytes is None:
        peak_bytes = estimate_activation_peak(
            model,
            max_num_batched_tokens=options.max_num_batched_tokens,
            sampled_rows=options.batch,
            bytes_per_value=bytes_per_value,
        )
    return estimate_process(model) if options.device == "cpu" else 0, peak_bytes


def _min_memory(model: ModelSpec, options: PlanOptions, dtype: str, kv_bytes: int) -> str:
    """The memory that leaves `kv_bytes` for KV, with each codec of the weights."""
    needed: dict[str, str] = {}
    for codec in dict.fromkeys((options.weight_codec, *_weight_codecs(options))):
        total_bytes = _memory_for(model, replace(options, weight_codec=codec), dtype, kv_bytes)
        needed[codec] = f"--memory {option_size(rounded_size(total_bytes))}"
        if codec != "auto":
            needed[codec] += f" with --weight-codec {codec}"
    return ", or ".join(needed.values())


def _memory_for(model: ModelSpec, options: PlanOptions, dtype: str, kv_bytes: int) -> int:
    """Bytes of the smallest device memory that leaves `kv_bytes` for KV."""
    weight_bytes = _weight_bytes(model, options, dtype) / model.num_parameters
    weights = planned_weights(model, weight_bytes, options.weights_memory_bytes)
    total_bytes = sum(_run_bytes(model, options, dtype_bytes(dtype))) + kv_bytes
    total_bytes += weights.device_bytes
    if options.headroom_bytes is None:
        total_bytes = math.ceil(total_bytes / (1 - DEFAULT_HEADROOM_SHARE))
    return total_bytes + (options.headroom_bytes or 0)


def _weight_codecs(options: PlanOptions) -> tuple[str, ...]:
    # offloaded layers are as stored, and quantized weights run on a CPU
    coded = options.weights_memory_bytes is None and options.device == "cpu"
    return ("auto", *(WEIGHT_BITS if coded else ()))


def _verdict(
    model: ModelSpec,
    memory: MemoryLayout,
    layout: CacheLayout,
    workload: Workload | None,
    weights: WeightsPlacement,
) -> CapacityVerdict | None:
    if workload is None:
        return None
    offloaded_bytes = weights.total_bytes - weights.device_bytes  # every step reads all weights
    return assess(
        model,
        replace(
            memory,
            total_bytes=memory.total_bytes + offloaded_bytes,
            weights_bytes=weights.total_bytes,
        ),
        workload.input_tokens,
        workload.output_tokens,
        workload.batch,
        layout=layout,
    )


_BAR_CELLS = 64
_STYLES = {
    "process": "cyan",
    "weights": "blue",
    "activations": "yellow",
    "KV": "green",
    "headroom": "magenta",
    "unassigned": "bright_black",
}
# letters make the bar readable without colour
_LETTERS = {"process": "P", "weights": "W", "activations": "A", "KV": "K", "headroom": "H"} | {
    "unassigned": "."
}


def render(report: PlanReport, quality: Quality | None = None) -> RenderableType:
    """Render the whole result for a terminal.

    Args:
        report: the result.
        quality: of a board; None without one.
    """
    coded = report.weight_codec != "auto"
    weights = f"{report.dtype}, quantized to {report.weight_codec}" if coded else report.dtype
    of_layers = zip(report.model.heads, report.model.layers, strict=True)
    shapes = dict.fromkeys(heads for heads, layer in of_layers if layer.attends)
    texts = dict.fromkeys(_heads_text(heads, report.model) for heads in shapes)
    heads = " or ".join(texts) or "no attention"
    title = Text(
        f"{report.model_name}: {report.model.num_parameters:,} parameters,"
        f" {report.model.num_layers} layers, {heads}, weights {weights}, KV {report.kv_codec}",
        style="bold",
    )
    parts: list[RenderableType] = [
        title,
        memory_bar(report.shown_memory),
        memory_table(report.shown_memory),
        capacity_table(report),
        *([kinds_table(report)] if _has_kinds(report) else []),
        choices_table(report),
    ]
    if report.free_bytes is not None:
        free = format_size(report.free_bytes)
        note = f"memory: all of this machine, of which {free} are free now; quire serve with "
        parts.insert(3, Text(f"{note}--kv-memory auto divides the free memory only"))
    if quality is not None:
        parts.append(quality_table(quality))
    if report.weights.offloaded_layers:
        size = format_size(report.weights.host_bytes)
        parts.append(Text(f"{report.weights.text}: {size} transferred to the device per step"))
    if report.verdict is not None:
        parts.append(verdict_text(report.verdict))
    return Group(*parts)


def memory_bar(memory: MemoryLayout) -> Text:
    """One line of 64 cells in proportion; a part above 0 bytes gets at least one cell."""
    cells = {
        name: max(1, round(_BAR_CELLS * size / memory.total_bytes)) if size else 0
        for name, size in _parts(memory).items()
    }
    largest = max(cells, key=lambda name: cells[name])
    cells[largest] += _BAR_CELLS - sum(cells.values())
    bar = Text("[")
    for name, count in cells.items():
        bar.append(_LETTERS[name] * count, style=_STYLES[name])
    return bar.append("]")


def memory_table(memory: MemoryLayout) -> Table:
    """Size and share of each part of the device memory."""
    table = Table("memory", "", "bytes", "size", "share", title_justify="left")
    for column in table.columns[2:]:
        column.justify = "right"
    for name, size in _parts(memory).items():
        table.add_row(
            Text(name, style=_STYLES[name]),
            _LETTERS[name],
            f"{size:,}",
            format_size(size),
            f"{size / memory.total_bytes:.1%}",
        )
    total = memory.total_bytes
    table.add_row("total", "", f"{total:,}", format_size(total), "100.0%", style="bold")
    return table


def capacity_table(report: PlanReport) -> Table:
    """Capacity of the KV memory, and the batch at which KV reads dominate."""
    fits = report.capacity
    table = Table("KV", "", show_header=False)
    per_token = report.kv_bytes_per_token
    table.add_row("bytes per token", f"{per_token:,} ({format_size(per_token)})")
    shapes = {(heads.key_dim, heads.value_dim): heads for heads in report.model.heads}
    for kind in report.kinds.values():
        if report.model.latent is not None:
            heads = shapes[kind.key_dim, kind.value_dim]
            of_layer = kind.bytes_per_token // kind.layers
            elements = kind.key_dim + kind.value_dim + kind.index_dim
            table.add_row(
                "bytes per token and layer",
                f"{of_layer:,}: {elements:,} elements instead of"
                f" {heads.values_per_expanded_pair:,} of {heads.query_heads} heads",
            )
    if report.state_bytes:
        size = format_size(report.state_bytes)
        table.add_row(
            "recurrent states", f"{report.state_bytes:,} B ({size}) per sequence and checkpoint"
        )
    tokens = f"{fits.page_tokens} tokens of one layer, all KV heads"
    sizes = sorted({kind.page_bytes for kind in report.kinds.values()})
    if sizes:
        table.add_row("page size", f"{' or '.join(f'{size:,}' for size in sizes)} B: {tokens}")
    if len(sizes) == 1 and not report.state_bytes:
        table.add_row("pages", f"{fits.pool_pages:,}")
    possible = fits.limit != "context"
    table.add_row(f"sequences of {fits.sequence_tokens:,} tokens", _sequences(report))
    if possible:
        table.add_row(f"batch of {report.batch:,}", report.fit)
    table.add_row(
        "longest sequence",
        f"{fits.longest_tokens:,} tokens with its output, limited by {fits.longest_limit}",
    )
    if report.sparse and possible:
        table.add_row(
            "sparse attention",
            f"{report.sparse}: a decode step reads {report.sparse_share:.1%} of the KV"
            f" of {fits.sequence_tokens:,} tokens, with the bounds of pages",
        )
    if report.disk_kv_bytes:
        size = format_size(report.disk_kv_bytes)
        table.add_row("prefixes on disk", f"up to {report.disk_tokens:,} tokens in {size}")
    if possible:
        table.add_row(
            "KV reads exceed weight reads",
            f"from batch {report.crossover_batch:,}; at batch {report.batch:,} KV is"
            f" {report.step.kv_share:.1%} of the bytes read by a decode step",
        )
    return table


def _heads_text(heads: HeadShape | LayerKind, model: ModelSpec) -> str:
    if heads.latent and model.latent is not None:
        index = f" and index key of {heads.index_dim}" if heads.index_dim else ""
        latent = f"latent of {heads.value_dim} + {heads.key_dim} rotated elements"
        return f"{latent}{index}, 1 for all heads"
    if heads.latent:
        s = "s" * (heads.kv_heads > 1)
        return f"{heads.kv_heads} value{s} of {heads.value_dim} + {heads.key_dim} rotated elements"
    same = heads.key_dim == heads.value_dim
    dims = f"{heads.key_dim}" + ("" if same else f" (keys) and {heads.value_dim} (values)")
    return f"{heads.kv_heads} KV head{'s' * (heads.kv_heads > 1)} of {dims}"


def _has_kinds(report: PlanReport) -> bool:
    kinds = report.kinds.values()
    return len(kinds) > 1 or any(kind.max_tokens or kind.reading_layers for kind in kinds)


def kinds_table(report: PlanReport) -> Table:
    """KV of each kind of layer, the bound of windows and chunks, and the saving of shared KV."""
    table = Table("layers", "", "heads", "B per token", "a sequence holds", title_justify="left")
    table.title = "KV by kind of layer"
    for column in (table.columns[1], table.columns[3]):
        column.justify = "right"
    for name, kind in report.kinds.items():
        held = "all tokens"
        if kind.max_tokens is not None and kind.max_bytes is not None:
            held = f"at most {kind.max_tokens:,} tokens, {format_size(kind.max_bytes)}"
        layers, per_token = f"{kind.layers}", f"{kind.bytes_per_token:,}"
        table.add_row(
            name.replace("_", " "), layers, _heads_text(kind, report.model), per_token, held
        )
        if kind.reading_layers:
            table.add_row("", f"{kind.reading_layers}", "read the KV of these", "0", "")
    saved, own = report.saved_bytes_per_token, report.kv_bytes_per_token
    if saved:
        table.caption = (
            f"layers that read the KV of others save {saved:,} of {own + saved:,} B per token "
            f"({saved / (own + saved):.0%})"
        )
    return table


def choices_table(report: PlanReport) -> Table:
    """What the memory holds with other codecs, and with eviction."""
    tokens = report.capacity.sequence_tokens
    table = Table("weights", "KV", "KV memory", "tokens", title_justify="left")
    table.title = f"Sequences of {tokens:,} tokens at once, by codec and by retained tokens"
    table.caption = (
        "50% and 25%: with an eviction rule of this cap; int4 weights may lose much quality"
    )
    for name in RETAINED:
        table.add_column(name)
    for column in table.columns:
        column.justify = "right" if column.header not in ("weights", "KV") else "left"
    for choice in report.choices:
        held = "any" if choice.tokens is None else f"{choice.tokens:,}"
        sizes = [format_size(choice.kv_bytes), held]
        counts = [f"{count:,}" for count in choice.sequences.values()]
        if not choice.kv_bytes:
            sizes, counts = ["does not fit", ""], ["" for _ in counts]
        table.add_row(choice.weight_codec, choice.kv_codec, *sizes, *counts)
    return table


def quality_table(quality: Quality) -> Table:
    """The quality of the best rules of a board."""
    table = Table("KV", title="Quality of the best rule of the board, by retained tokens")
    for name in RETAINED:
        table.add_column(name, justify="right")
    for codec, means in quality.items():
        table.add_row(codec, *(f"{means[name]:.2f}" if name in means else "-" for name in RETAINED))
    return table


def verdict_text(verdict: CapacityVerdict) -> Text:
    """The assessment of a workload with its reasons."""
    text = Text("benefit of KV management: ")
    text.append(verdict.impact, style="bold")
    for reason in verdict.reasons:
        text.append(f"\n  - {reason}")
    return text


def _sequences(report: PlanReport) -> str:
    fits = report.capacity
    if fits.limit == "context":
        return f"impossible: the model's context is {report.model.max_positions:,} tokens"
    return f"{fits.sequences:,} ({fits.pages_per_sequence:,} pages each)"


def _parts(memory: MemoryLayout) -> dict[str, int]:
    parts = {
        "process": memory.process_bytes,
        "weights": memory.weights_bytes,
        "activations": memory.activation_peak_bytes,
        "KV": memory.kv_bytes,
        "headroom": memory.headroom_bytes,
        "unassigned": memory.unassigned_bytes,
    }
    return {
        name: size for name, size in parts.items() if size or name not in ("process", "unassigned")
    }
