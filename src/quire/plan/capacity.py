"""Division of a device's memory, and the number of sequences that fit in its KV memory.

Pages are the engine's: one page holds `page_tokens` tokens of one layer, all its KV heads. A window
layer frees a page once its last token has left the window. So while decoding it holds at most the
pages that W tokens can touch.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from quire.errors import ConfigError
from quire.layout.layout import layout_for
from quire.layout.model import ModelSpec
from quire.layout.pages import INDEX, CacheLayout, PageClass, choose_slab_bytes, slabs_for
from quire.layout.sizes import format_size
from quire.layout.sparse import SparseSpec
from quire.plan.roofline import decode_step

# Capacity: pages of a sequence, sequences in a pool, the longest sequence, and the limit.

Limit = Literal["memory", "context", "none"]
WEIGHT_BITS = {"int8": 8, "int4": 4}
SCALE_GROUP = 128  # inputs that share a scale of an int4 weight


UNLIMITED = 1 << 40  # tokens
Pages = Mapping[PageClass, int]
"""Number of pages by page class."""


def sequence_pages(layout: CacheLayout, tokens: int, retained: int | None = None) -> Pages:
    """Pages of one sequence of `tokens` tokens while it decodes.

    Args:
        layout: lane groups of the sequence.
        tokens: its length.
        retained: tokens that a lane without a window retains; None: no eviction.
    """
    least = tokens if retained is None else min(tokens, retained)
    pages: Counter[PageClass] = Counter()
    for group in layout.groups:
        slots = group.slots_at_most(tokens if group.bounded else least, 1)
        pages[group.page_class] += group.page_class.pages_for(slots) * group.num_lanes
    return pages


def sparse_read_share(
    layout: CacheLayout, plain: CacheLayout, sparse: SparseSpec, tokens: int
) -> float:
    """Fraction of a sequence's KV bytes that a decode step reads, with the bounds of its pages.

    Args:
        layout: whose pages have bounds.
        plain: the same without bounds.
        sparse: the pages that are read.
        tokens: length of the sequence.
    """
    read_bytes = held_bytes = 0
    for group, of_plain in zip(layout.groups, plain.groups, strict=True):
        if group.private:  # not read by attention
            continue
        kv_bytes = of_plain.page_class.page_bytes
        bounds_bytes = group.page_class.page_bytes - kv_bytes
        held = group.page_class.pages_for(group.slots_at_most(tokens, 1))
        read = (bounds_bytes and sparse.pages_read(held)) or held
        dense = bisect_left(group.layers, sparse.dense_layers)
        if read == held:
            dense = len(group.layers)
        of_sparse = read * kv_bytes + held * bounds_bytes
        lanes = group.readers * group.num_lanes // len(group.layers)
        held_bytes += lanes * len(group.layers) * held * kv_bytes
        read_bytes += lanes * (dense * held * kv_bytes + (len(group.layers) - dense) * of_sparse)
    return read_bytes / max(1, held_bytes)


def sequence_bytes(layout: CacheLayout, tokens: int, retained: int | None = None) -> int:
    """Bytes of the pages of `sequence_pages`."""
    pages = sequence_pages(layout, tokens, retained)
    return sum(page.page_bytes * count for page, count in pages.items())


def token_bytes(layout: CacheLayout) -> Fraction:
    """Bytes that one more token adds in all layers, before windows are full.

    Includes codec metadata, and the token's share of per-page metadata. Excludes page padding and
    per-sequence constants.
    """
    return sum(
        (
            Fraction(page.data_bytes, page.tokens) * group.num_lanes
            for group in layout.groups
            if not group.private
            for page in [group.page_class]
        ),
        start=Fraction(0),
    )


def state_bytes(layout: CacheLayout) -> int:
    """Bytes of the pages with the recurrent states of one sequence, of any length."""
    states = (group for group in layout.groups if group.state is not None)
    return sum(group.bytes_at_most(1, 1) for group in states)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """KV of the layers of one lane group: same kind of attention, same heads, same codec."""

    layers: int  # that store KV
    reading_layers: int  # others that read this KV and store none
    kv_heads: int
    key_dim: int
    value_dim: int
    latent: bool  # values are latents, and keys their rotated parts
    index_dim: int  # elements of an index key; 0: none is stored
    page_bytes: int  # of one layer
    bytes_per_token: int  # in all layers, before a window or chunk is full
    max_tokens: int | None  # of a decoding sequence, in a layer; None: all
    max_bytes: int | None  # of a decoding sequence, in all layers and whole pages

    @property
    def saved_bytes_per_token(self) -> int:
        """Bytes that the reading layers would store."""
        return self.bytes_per_token * self.reading_layers // self.layers


def layer_kinds(layout: CacheLayout) -> dict[str, LayerKind]:
    """Return the KV of each kind of layer by the name of its lane group."""
    kinds = {}
    for group in layout.groups:
        if group.private:
            continue
        page, layers = group.page_class, len(group.layers)
        bound = group.slots_at_most(UNLIMITED, 1) if group.bounded else None
        kinds[group.name] = LayerKind(
            layers=layers,
            reading_layers=layers * (group.readers - 1),
            kv_heads=page.heads * group.lanes_per_layer,
            key_dim=page.head_dim,
            value_dim=page.value_dim,
            latent=page.joined,
            index_dim=0 if (index := page.index(INDEX)) is None else page.planes[index].width,
            page_bytes=page.page_bytes,
            bytes_per_token=math.ceil(Fraction(page.data_bytes, page.tokens) * group.num_lanes),
            max_tokens=bound,
            max_bytes=None if bound is None else group.bytes_at_most(UNLIMITED, 1),
        )
    return kinds


def bytes_per_value(model: ModelSpec, layout: CacheLayout) -> float:
    """Average bytes of one element over keys, values and layers; 0 without attention."""
    return float(token_bytes(layout) / max(1, model.kv_values_per_token))


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The capacity of a KV memory."""

    page_tokens: int
    page_bytes: int  # keys and values of all heads of one layer, of the first kind of layer
    pool_bytes: int  # of whole slabs
    pool_pages: int  # whole pages of the KV memory's slabs
    # of sequences of `sequence_tokens` tokens, in whole pages; None: tokens need no memory
    pool_tokens: int | None
    sequence_tokens: int
    pages_per_sequence: int  # in all layers
    sequences: int  # that fit; 0 if the model's context is shorter
    longest_tokens: int  # of a single sequence: prompt and output
    longest_limit: Limit  # memory or the model's context
    limit: Limit  # of a batch of the wanted size; "none" if it fits


def capacity(
    model: ModelSpec,
    kv_bytes: int,
    *,
    layout: CacheLayout,
    sequence_tokens: int,
    batch: int,
    retained: int | None = None,
) -> Capacity:
    """Compute the capacity of `kv_bytes` of KV memory; `retained` as in `sequence_bytes`."""
    if sequence_tokens < 1 or batch < 1:
        raise ConfigError(
            f"sequence_tokens={sequence_tokens}, batch={batch}: expected 1 or more of each"
        )
    page = layout.groups[0].page_class
    first = " and ".join(
        f"a page of {page_class.page_bytes:,} B in each of {count} layer{'s' * (count > 1)}"
        for page_class, count in sequence_pages(layout, 1).items()
    )
    too_small = ConfigError(
        f"a KV memory of {kv_bytes:,} B does not hold one sequence: its first token needs {first}"
        f" = {layout.smallest_sequence_bytes:,} B; raise --kv-memory or lower --block-size"
    )
    if kv_bytes < layout.smallest_sequence_bytes:
        raise too_small
    sizes = [page_class.page_bytes for page_class in layout.page_classes]
    slab_bytes = choose_slab_bytes(kv_bytes, sizes)
    slabs = kv_bytes // slab_bytes
    usable_bytes = slabs * slab_bytes

    def fits(tokens: int, number: int = 1) -> bool:
        pages = sequence_pages(layout, tokens, retained).items()
        return slabs >= slabs_for(
            slab_bytes, ((each.page_bytes, count * number) for each, count in pages)
        )

    if not fits(1):
        raise too_small
    needed = sequence_pages(layout, sequence_tokens, retained)
    needed_bytes = sum(each.page_bytes * count for each, count in needed.items())
    too_long = sequence_tokens > model.max_positions
    numbers = range(1, 0 if too_long else usable_bytes // needed_bytes + 1)
    sequences = bisect_left(numbers, True, key=lambda number: not fits(sequence_tokens, number))
    lengths = range(1, model.max_positions + 1)
    # the KV of the last token is never computed
    longest = bisect_left(lengths, True, key=lambda tokens: not fits(max(1, tokens - 1)))
    tokens = usable_bytes * sequence_tokens // needed_bytes if token_bytes(layout) else None
    return Capacity(
        page_tokens=page.tokens,
        page_bytes=page.page_bytes,
        pool_bytes=usable_bytes,
        pool_pages=usable_bytes // page.page_bytes,
        pool_tokens=tokens and tokens // page.tokens * page.tokens,
        sequence_tokens=sequence_tokens,
        pages_per_sequence=sum(needed.values()),
        sequences=sequences,
        longest_tokens=longest,
        longest_limit="context" if longest == model.max_positions else "memory",
        limit="context" if too_long else "memory" if sequences < batch else "none",
    )


# ---- memory --------------------------------------------------------------------------------------

# Division of a device's memory: the process on a CPU, weights, activations, headroom, and the rest
# for KV.
#
# | process | weights | activation peak | headroom |            KV             | unassigned |
# |<------------------------------------ total ------------------------------------------>|

DEFAULT_HEADROOM_SHARE = 0.1
"""Default fraction of the total left free for the allocator and other programs."""

_IMPORTED_BYTES = 500 * 2**20  # Python, PyTorch for CPUs, Transformers and Quire after a step
_TOKENIZER_BYTES = 1024  # per token of its vocabulary
_LOGITS_BYTES = 4  # logits and probabilities are computed in float32


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLayout:
    """Bytes of a device's memory by use."""

    total_bytes: int
    weights_bytes: int
    activation_peak_bytes: int
    headroom_bytes: int
    kv_bytes: int
    process_bytes: int = 0  # on a CPU; the process is in no device's memory

    def __post_init__(self) -> None:
        if self.unassigned_bytes < 0:
            held = format_size(self.process_bytes)
            process = f"the process {held}, " if self.process_bytes else ""
            raise ConfigError(
                f"kv_memory={format_size(self.kv_bytes)} does not fit: "
                f"{format_size(max(self.total_bytes - self._overhead_bytes, 0))} remain of"
                f" {format_size(self.total_bytes)} after {process}weights"
                f" {format_size(self.weights_bytes)}, activations"
                f" {format_size(self.activation_peak_bytes)} and headroom"
                f" {format_size(self.headroom_bytes)}; lower --kv-memory or --headroom"
            )

    @property
    def _overhead_bytes(self) -> int:
        used_bytes = self.process_bytes + self.weights_bytes + self.activation_peak_bytes
        return used_bytes + self.headroom_bytes

    @property
    def unassigned_bytes(self) -> int:
        """Bytes without a use: 0 if the size of KV memory was chosen automatically."""
        return self.total_bytes - self._overhead_bytes - self.kv_bytes


def coded_weight_bytes(model: ModelSpec, codec: str, bytes_per_value: int | float) -> int:
    """Bytes of all weights: int8 has a scale per output, int4 one per SCALE_GROUP too.

    Projections of latents are not quantized: attention multiplies with parts of them.
    """
    scale_bytes = {8: 4 / model.hidden_size, 4: 4 / SCALE_GROUP}
    bits, head = WEIGHT_BITS[codec], model.embedding_parameters
    attending = zip(model.heads, model.layers, strict=True)
    latents = sum(heads.values_per_expansion for heads, layer in attending if layer.attends)
    coded = model.layer_parameters - latents
    plain = model.num_parameters - coded - head
    return math.ceil(
        coded * (bits / 8 + scale_bytes[bits])
        + head * (1 + scale_bytes[8])
        + plain * bytes_per_value
    )


def auto_kv_memory(
    total_bytes: int,
    weights_bytes: int,
    activation_peak_bytes: int,
    headroom_bytes: int,
    process_bytes: int = 0,
    *,
    weight_codec: str = "auto",
) -> int:
    """Size of KV memory that uses the rest of `total_bytes`.

    An error advises codecs with fewer bits than `weight_codec`.
    """
    kv_bytes = total_bytes - weights_bytes - activation_peak_bytes - headroom_bytes - process_bytes
    if kv_bytes <= 0:
        process = f" - process {process_bytes:,} B" if process_bytes else ""
        bits = WEIGHT_BITS.get(weight_codec, math.inf)
        codecs = " or ".join(codec for codec, fewer in WEIGHT_BITS.items() if fewer < bits)
        quantize = codecs and f"quantize the weights (--weight-codec {codecs}, on a CPU), "
        raise ConfigError(
            f"no memory is left for KV: total {total_bytes:,} B{process} - weights"
            f" {weights_bytes:,} B - activation peak {activation_peak_bytes:,} B - headroom"
            f" {headroom_bytes:,} B = {kv_bytes:,} B; {quantize}offload layers (--weights-memory),"
            " lower --max-num-batched-tokens, or take more memory or a smaller model"
        )
    return kv_bytes


def estimate_process(model: ModelSpec) -> int:
    """Estimate the resident bytes of a process on a CPU without weights, activations and KV.

    Measured with PyTorch 2.13 for CPUs and Transformers 5.24; a server takes about 45 MiB more.
    """
    return _IMPORTED_BYTES + _TOKENIZER_BYTES * model.vocab_size


def estimate_activation_peak(
    model: ModelSpec, *, max_num_batched_tokens: int, sampled_rows: int, bytes_per_value: int
) -> int:
    """Estimate the peak bytes of activations in one step.

    Two tensors of the hidden size (the residual and its norm; AltUp has more residuals) and the
    embeddings of all layers of a model that has them are always live. The largest of three other
    sets is added, of which one is live at a time:

        attention   max_num_batched_tokens * (heads + kv_heads) * (key_dim + value_dim)
                    query, key, value, output; of latents see `HeadShape.activations_per_token`
        MLP         max_num_batched_tokens * width * (3 if gated else 2)
                    gate, up, product
        logits      sampled_rows * vocab * (bytes_per_value + 2 * 4 bytes)
                    logits, float32 copy, probabilities

    Scratch of the attention kernel, workspaces of matrix libraries and the runtime itself are not
    included. They belong to the headroom, or to a measured peak used instead of this estimate.
    """
    if max_num_batched_tokens < 0 or sampled_rows < 0:
        raise ConfigError(
            f"max_num_batched_tokens={max_num_batched_tokens}, sampled_rows={sampled_rows}: "
            "expected 0 or more"
        )
    width = model.intermediate_size
    if model.mixture is not None:
        experts = model.mixture.experts_per_token * model.mixture.expert_size
        width = max(width, experts + model.mixture.shared_size)
    attention = max(heads.activations_per_token for heads in model.heads)
    mlp = (3 if model.gated_mlp else 2) * width
    logits_bytes = sampled_rows * model.vocab_size * (bytes_per_value + 2 * _LOGITS_BYTES)
    layer_bytes = max_num_batched_tokens * max(attention, mlp) * bytes_per_value
    live = (1 + max(model.extra.streams, 1)) * model.hidden_size
    live += model.num_layers * model.extra.layer_width
    streams_bytes = max_num_batched_tokens * live * bytes_per_value
    return streams_bytes + max(layer_bytes, logits_bytes)


def hidden_state_bytes(model: ModelSpec, tokens: int) -> int:
    """Bytes of a prompt between two layers: its residual stream, cosines and sines in float32."""
    live = model.hidden_size * max(model.extra.streams, 1)
    live += model.num_layers * model.extra.layer_width
    return 4 * tokens * (live + 2 * sum({heads.key_dim for heads in model.heads}))


Impact = Literal["low", "low-medium", "high", "very high", "critical"]

DEFAULT_FLOPS_PER_BYTE = 150.0
"""Machine balance: an A100 does 312e12 FLOP/s in 16 bits and reads 2.0e12 B/s. CPUs: 10 to 30."""

_USED_OF_CONTIGUOUS = 0.32  # the article's weighted average over four workloads: 68 % is wasted
_NEGLIGIBLE = _USED_OF_CONTIGUOUS / 6
_MODERATE = _USED_OF_CONTIGUOUS / 2
_HEAVY = _USED_OF_CONTIGUOUS * 1.5
_PREFILL_DOMINATED = 0.1  # decode share below which a faster or larger decode batch hardly matters


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests of equal lengths.

    Raises:
        ConfigError: a count below 1.
    """

    input_tokens: int
    output_tokens: int
    batch: int

    def __post_init__(self) -> None:
        if min(self.input_tokens, self.output_tokens, self.batch) < 1:
            raise ConfigError(
                f"workload {self.input_tokens},{self.output_tokens},{self.batch}: input tokens,"
                " output tokens and batch are all 1 or more"
            )

    @property
    def tokens(self) -> int:
        return self.input_tokens + self.output_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityVerdict:
    """How much KV management matters for a workload, and why."""

    impact: Impact  # from "low" (simple allocation suffices) to "critical" (the workload needs it)
    kv_bytes: int  # of the whole batch at its longest, in whole pages
    kv_share: float  # of the KV memory; above 1 it does not fit
    sequences: int  # that fit at once
    decode_share: float  # fraction (0 to 1) of a request's device time
    reasons: tuple[str, ...]  # sentences with the decisive figures

    @property
    def pays(self) -> bool:
        return self.impact not in ("low", "low-medium")


def assess(
    model: ModelSpec,
    memory: MemoryLayout,
    input_tokens: int,
    output_tokens: int,
    batch: int,
    *,
    layout: CacheLayout | None = None,
    flops_per_byte: int | float = DEFAULT_FLOPS_PER_BYTE,
) -> CapacityVerdict:
    """Assess how much KV management matters."""
    workload = Workload(input_tokens=input_tokens, output_tokens=output_tokens, batch=batch)
    if memory.kv_bytes < 1 or flops_per_byte <= 0:
        raise ConfigError(
            f"kv_memory={memory.kv_bytes} B, flops_per_byte={flops_per_byte}: expected both above 0"
        )
    layout = layout or layout_for(model, page_tokens=16, codec="float16")
    each_bytes = sequence_bytes(layout, workload.tokens)
    weight_bytes_per_value = memory.weights_bytes / model.num_parameters
    sequences = memory.kv_bytes // each_bytes
    kv_share = batch * each_bytes / memory.kv_bytes
    share = decode_share(
        model,
        workload,
        weight_bytes_per_value=weight_bytes_per_value,
        kv_bytes_per_value=bytes_per_value(model, layout),
        flops_per_byte=flops_per_byte,
    )
    # two operations per weight and token: from this batch on the step is compute-bound
    full_batch = flops_per_byte * weight_bytes_per_value / 2
    impact, reason = _judge(kv_share, sequences, share, full_batch)
    verdict = CapacityVerdict(
        impact=impact,
        kv_bytes=batch * each_bytes,
        kv_share=kv_share,
        sequences=sequences,
        decode_share=share,
        reasons=(reason,),
    )
    return replace(verdict, reasons=(reason, *_figures(verdict, workload, model.max_positions)))


def _figures(verdict: CapacityVerdict, workload: Workload, max_positions: int) -> Iterator[str]:
    yield (
        f"KV of {workload.batch} requests of {workload.tokens:,} tokens:"
        f" {format_size(verdict.kv_bytes)}, {verdict.kv_share:.1%} of the KV memory;"
        f" {verdict.sequences:,} of them fit"
    )
    yield f"decode is {verdict.decode_share:.0%} of a request's time"
    if workload.tokens > max_positions:
        yield (
            f"{workload.tokens:,} tokens exceed the model's context of {max_positions:,}: such"
            " requests are refused"
        )


def decode_share(
    model: ModelSpec,
    workload: Workload,
    *,
    weight_bytes_per_value: int | float,
    kv_bytes_per_value: int | float,
    flops_per_byte: int | float,
) -> float:
    """Fraction (0 to 1) of one request's device time spent in decode.

    Times are in byte reads. Prefill: 2 * active weights operations per token. Decode step: the
    larger of its reads and its operations, shared by the batch, at half of the output.
    """
    operations = 2 * model.num_active_parameters
    prefill = workload.input_tokens * operations / flops_per_byte
    step = decode_step(
        model,
        batch=workload.batch,
        tokens=workload.input_tokens + workload.output_tokens // 2,
        weight_bytes_per_value=weight_bytes_per_value,
        kv_bytes_per_value=kv_bytes_per_value,
    )
    compute = workload.batch * operations / flops_per_byte
    decode = workload.output_tokens * max(step.read_bytes, compute) / workload.batch
    return decode / (prefill + decode)


def _judge(kv_share: float, sequences: int, share: float, full_batch: float) -> tuple[Impact, str]:
    if sequences < 1:
        return "critical", "no request fits: KV must be evicted, quantized or offloaded"
    if share < _PREFILL_DOMINATED:
        return "low", "prefill dominates: KV is short-lived; make prefill faster instead"
    if kv_share < _NEGLIGIBLE:
        return (
            "low",
            "KV is a small fraction of its memory: a simple contiguous allocation suffices",
        )
    if kv_share < _MODERATE:
        return "low-medium", "a contiguous allocation at maximum length still fits twice"
    if kv_share >= 1:
        return (
            "critical",
            "the batch does not fit: evict, quantize or offload KV, or queue requests",
        )
    if 2 * sequences < full_batch:
        return "critical", (
            f"memory holds {sequences:,} requests, the compute could serve"
            f" {full_batch:.0f}: saved KV memory increases throughput"
        )
    if kv_share >= _HEAVY:
        return "very high", "a contiguous allocation would need more than all KV memory"
    return "high", "a contiguous allocation would take more than half of the KV memory"
