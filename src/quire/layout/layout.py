"""Lane groups of a model's sequences, from the model's shape, KV format and statistics."""

import math
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial

from quire.errors import ConfigError
from quire.layout.codec_names import codec_spec
from quire.layout.codecs import CodecSpec
from quire.layout.kv_format import KVFormat, read_format
from quire.layout.model import CONV, HeadShape, ModelSpec, StateSpec
from quire.layout.pages import (
    BOUNDS,
    INDEX,
    KEY,
    NUMBERS,
    PAGES_OF_A_SLAB,
    VALUE,
    CacheLayout,
    LaneGroup,
    PageClass,
    PlaneSpec,
    kv_pages,
)
from quire.layout.sizes import HUGE_PAGE_BYTES
from quire.layout.statistics import Statistic
from quire.layout.token_precision import FullPrecisionTokens, PromotedTokens, Records

STATISTICS_CODEC = STATES_CODEC = "float32"
CODED_BOUNDS = "float16"  # bounds of the keys of codes: their scales are float16
CONVOLUTIONS_CODEC = "bfloat16"  # if states are quantized: they are inputs of a token each


def layout_for(  # noqa: PLR0913 - the options of an engine
    model: ModelSpec,
    *,
    codec: str,
    page_tokens: int,
    evicting: bool = False,
    heads_apart: bool = False,
    rotated: bool = True,
    statistics: Collection[Statistic] = (),
    bounds: bool = False,
) -> CacheLayout:
    """Build the layout: a lane group for each kind of attention and shape of heads, and statistics.

    Layers that read the keys and values of another layer have no lanes.

    Args:
        model: heads, dims and windows.
        codec: KV codec in the syntax of `read_format`.
        page_tokens: slots in a page.
        evicting: whether single tokens are evicted from full-attention lanes. Their slots are then
            unordered and their pages store positions. Window lanes stay ordered, because the
            window already limits them.
        heads_apart: whether the KV heads of a layer with eviction retain different tokens; each KV
            head then has a lane of one-head pages.
        rotated: whether keys are stored after RoPE, in all layers.
        statistics: attention statistics of full-attention layers; each is a private group, used by
            the sequences whose policy needs it.
        bounds: whether pages of full-attention layers have bounds of their keys, for sparse
            attention.
    """
    groups: list[LaneGroup] = []
    form = read_format(codec)
    for part in _parts(model, form):
        loses_order = evicting and part.window is None and part.chunk is None
        lanes_per_layer = part.heads.kv_heads if heads_apart and loses_order else 1
        key, value = part.codecs
        index = part.heads.index
        more: tuple[PlaneSpec, ...] = ()
        if index is not None and index.dim:
            more = (PlaneSpec(INDEX, _index_codec(form), index.dim),)
        if bounds and part.window is None and part.chunk is None:
            codec_of_bounds = key if key.is_plain else codec_spec(CODED_BOUNDS)
            heads = part.heads.kv_heads // lanes_per_layer
            width = 2 * part.heads.key_dim
            more += (PlaneSpec(BOUNDS, codec_of_bounds, width, heads, of_page=True),)
        group = LaneGroup(
            name=part.name,
            page_class=kv_pages(
                key=key,
                value=value,
                head_dim=part.heads.key_dim,
                value_dim=part.heads.value_dim,
                heads=part.heads.kv_heads // lanes_per_layer,
                tokens=page_tokens,
                positions=loses_order,
                rotated=rotated,
                joined=part.heads.latent is not None,
                more=more,
            ),
            layers=part.layers,
            lanes_per_layer=lanes_per_layer,
            window=part.window,
            chunk=part.chunk,
            topk=None if index is None else index.topk,
            readers=part.readers,
            ordered=not loses_order,
        )
        groups.append(group)
        if not group.bounded:
            groups.extend(_statistics_groups(part.heads, group, statistics))
        if not group.page_class.is_plain and (form.sinks or form.recent(page_tokens)):
            groups.append(_full_precision_group(group, form))
        if loses_order and form.promoted is not None and not group.page_class.is_plain:
            groups.append(_promoted_group(group, form.promoted))
    states = list(_state_groups(model, form.states or codec_spec(STATES_CODEC)))
    if form.states is not None and not states:
        raise ConfigError(
            f"KV codec {codec!r}: states={form.states.name} has no effect: the model has no "
            "recurrent states; remove it"
        )
    groups.extend(states)
    shared = [
        (layer, spec.source) for layer, spec in enumerate(model.layers) if spec.source is not None
    ]
    return CacheLayout(tuple(groups), tuple(shared))


@dataclass(frozen=True, slots=True)
class _Part:
    """Layers that share a lane group: same kind of attention, same heads, same codecs."""

    name: str
    layers: tuple[int, ...]
    window: int | None
    chunk: int | None
    heads: HeadShape
    readers: int
    codecs: tuple[CodecSpec, CodecSpec]


def _parts(model: ModelSpec, form: KVFormat) -> Iterator[_Part]:
    # the layers of a draft model are the last ones and all unquantized
    last = sum(not layer.drafts for layer in model.layers) - form.plain_layers
    plain = {
        i
        for i in range(len(model.layers))
        if not form.is_plain and (i < form.plain_layers or i >= last)
    }
    readers = Counter(layer.source for layer in model.layers)
    by_kind: dict[tuple[int | None, int | None], dict[tuple[HeadShape, int], list[int]]] = {}
    for number, (layer, heads) in enumerate(zip(model.layers, model.heads, strict=True)):
        if layer.stores:
            of_kind = by_kind.setdefault((layer.window, layer.chunk), {})
            of_kind.setdefault((heads, 1 + readers[number]), []).append(number)
    for window, chunk in sorted(by_kind, key=lambda kind: (kind[0] or 0, kind[1] or 0)):
        name = "full" if window is None else f"window_{window}"
        name = name if chunk is None else f"chunk_{chunk}"
        for number, ((heads, count), layers) in enumerate(by_kind[window, chunk].items()):
            part = partial(_Part, window=window, chunk=chunk, heads=heads, readers=count)
            own = name if not number else f"{name}_{number + 1}"
            coded = tuple(i for i in layers if i not in plain)
            if coded:
                yield part(own, coded, codecs=(form.key, form.value))
            if len(coded) < len(layers):
                kept = tuple(i for i in layers if i in plain)
                yield part(f"{own}.plain", kept, codecs=(form.required_plain,) * 2)


def _index_codec(form: KVFormat) -> CodecSpec:
    """The codec of index keys, which are not quantized."""
    plain = [codec for codec in (form.key, form.value) if codec.is_plain]
    return plain[0] if plain else form.required_plain


def _state_groups(model: ModelSpec, codec: CodecSpec) -> Iterator[LaneGroup]:
    """Build a group for each shape of recurrent states, of a fixed number of pages per layer."""
    layers: dict[StateSpec, list[int]] = {}
    for number, layer in enumerate(model.layers):
        if layer.state is not None:
            layers.setdefault(layer.state, []).append(number)
    for number, (state, of_state) in enumerate(layers.items()):
        pages = _state_pages(state, codec)
        yield LaneGroup(
            name="state" if not number else f"state_{number + 1}",
            page_class=pages[0],
            layers=tuple(of_state),
            lanes_per_layer=len(pages),
            records=1,
            state=state,
        )


def _state_pages(state: StateSpec, codec: CodecSpec) -> tuple[PageClass, ...]:
    """Return the equal pages of a state: as many as make a slab of usual size hold many of them.

    Pages of several MiB, of a class of their own, would waste up to a third of a small arena. A
    page has the same fraction of each tensor, and all pages together have no more bytes than one.
    """
    of_conv = codec if codec.is_plain else codec_spec(CONVOLUTIONS_CODEC)
    rows = {name: math.prod(shape[:-1]) for name, shape in state.shapes.items()}
    found: tuple[PageClass, ...] = ()
    common = math.gcd(*rows.values())
    for count in (n for n in range(1, common + 1) if common % n == 0):
        planes = tuple(
            PlaneSpec(name, of_conv if name == CONV else codec, shape[-1], rows[name] // count)
            for name, shape in state.shapes.items()
        )
        pages = (PageClass(planes=planes, tokens=1),) * count
        if not found or pages[0].page_bytes * count <= found[0].page_bytes * len(found):
            found = pages
        if found[0].page_bytes * PAGES_OF_A_SLAB <= HUGE_PAGE_BYTES:
            break
    return found


def _full_precision_group(group: LaneGroup, form: KVFormat) -> LaneGroup:
    """Build the group of a group's full-precision tokens: one page per lane."""
    page_tokens = group.page_class.tokens
    bound = group.window or group.chunk
    if bound is not None:  # no query attends to tokens outside the window or chunk
        form = replace(form, residual=min(form.residual, bound))
    full_precision = FullPrecisionTokens(
        sinks=form.sinks,
        residual=form.residual,
        recent=form.recent(page_tokens),
        page_tokens=page_tokens if form.per_page else 1,
        relocated=page_tokens if form.per_page and not group.ordered else 0,
    )
    return LaneGroup(
        name=f"{group.name}.full_precision",
        page_class=kv_pages(
            key=form.required_plain,
            value=form.required_plain,
            head_dim=group.page_class.head_dim,
            value_dim=group.page_class.value_dim,
            heads=group.page_class.heads,
            tokens=full_precision.records,
            positions=full_precision.relocated > 0,
            rotated=group.page_class.rotated,
            joined=group.page_class.joined,
        ),
        layers=group.layers,
        lanes_per_layer=group.lanes_per_layer,
        of=group.name,
        records=full_precision.records,
        full_precision=full_precision,
    )


def _promoted_group(group: LaneGroup, records: Records) -> LaneGroup:
    """Build the group of a group's promoted tokens, with their positions: one page per lane."""
    return LaneGroup(
        name=f"{group.name}.promoted",
        page_class=kv_pages(
            key=records.key,
            value=records.value,
            head_dim=group.page_class.head_dim,
            value_dim=group.page_class.value_dim,
            heads=group.page_class.heads,
            tokens=records.count,
            positions=True,
            rotated=group.page_class.rotated,
            joined=group.page_class.joined,
        ),
        layers=group.layers,
        lanes_per_layer=group.lanes_per_layer,
        of=group.name,
        records=records.count,
        checkpointed=False,  # no token is promoted before the first eviction
        promoted=PromotedTokens(count=records.count),
    )


def _statistics_groups(
    heads: HeadShape, group: LaneGroup, statistics: Collection[Statistic]
) -> Iterator[LaneGroup]:
    heads = replace(heads, query_heads=heads.query_heads * group.readers)
    for statistic in dict.fromkeys(statistics):
        slots = None if statistic.per_slot else statistic.num_slots(heads)
        yield LaneGroup(
            name=statistics_name(group.name, statistic),
            page_class=PageClass(
                planes=(
                    PlaneSpec(
                        NUMBERS,
                        codec_spec(STATISTICS_CODEC),
                        statistic.width(heads),
                        group.page_class.heads * statistic.heads_each(heads),
                    ),
                ),
                tokens=group.page_class.tokens if slots is None else slots,
            ),
            layers=group.layers,
            lanes_per_layer=group.lanes_per_layer,
            of=group.name,
            records=slots,
            optional=True,
            checkpointed=statistic.scoring is None,  # a pass writes all numbers
            statistic=statistic,
        )


def added_statistics(
    model: ModelSpec, layout: CacheLayout, statistics: Collection[Statistic]
) -> tuple[LaneGroup, ...]:
    """Return the groups of statistics that a layout lacks, for its layers with eviction."""
    names = {group.name for group in layout.groups}
    found = (
        one
        for group in layout.groups
        if not group.private and not group.bounded
        for one in _statistics_groups(model.heads[group.layers[0]], group, statistics)
    )
    return tuple(one for one in found if one.name not in names)


def statistics_name(group: str, statistic: Statistic) -> str:
    """Return the name of the lane group that holds a statistic of a KV group."""
    return f"{group}.{statistic.name}"


def page_and_fixed_bytes(layout: CacheLayout) -> tuple[int, int]:
    """Return the bytes of one page in every lane with eviction, and the length-independent bytes.

    Args:
        layout: layout with exactly the statistics that the sequences use.

    Returns:
        Bytes of one page in every lane with eviction, with its per-slot statistics; and bytes of
        statistics with fixed slots, full-precision tokens and promoted tokens of these lanes.
    """
    page_bytes = fixed_bytes = 0
    in_order = {group.name for group in layout.groups if group.ordered}
    for group in layout.groups:
        lanes_bytes = group.num_lanes * group.page_class.page_bytes
        if group.of in in_order:
            continue  # a window group: no rule evicts its tokens
        if group.records is not None:
            fixed_bytes += lanes_bytes
        elif not group.ordered:
            page_bytes += lanes_bytes
    return page_bytes, fixed_bytes


def statistics_used(layout: CacheLayout, statistics: Collection[Statistic]) -> frozenset[str]:
    """Return the names of the private groups of a sequence that uses these statistics.

    The result is an argument of `KVMemory.start`. Groups that are not optional are always included.
    A layout without layers with eviction has no statistics groups.
    """
    wanted = {
        statistics_name(group.name, statistic)
        for group in layout.groups
        if not group.private
        for statistic in statistics
    }
    private = {group.name: group.optional for group in layout.groups if group.private}
    return frozenset(name for name, optional in private.items() if not optional or name in wanted)


def layout_fingerprint(layout: CacheLayout) -> str:
    """Return the identity of the bytes of shareable pages, for storage outside of the process.

    Depends on the groups that sequences can share and on recurrent states, in order: not on their
    names, and not on other private groups, whose records are stored under their names.
    """
    stored = (group for group in layout.groups if not group.private or group.state is not None)
    return "\n".join(map(_group_fingerprint, stored))


def _group_fingerprint(group: LaneGroup) -> str:
    """Identity of a group's page bytes and of the order of its lanes."""
    layers = ",".join(map(str, group.layers))
    return (
        f"layers={layers} lanes_per_layer={group.lanes_per_layer} window={group.window} "
        + (f"chunk={group.chunk} " if group.chunk is not None else "")
        + f"ordered={group.ordered} | {_page_fingerprint(group.page_class)}"
    )


def _page_fingerprint(page: PageClass) -> str:
    """Identity of a page's bytes: codecs, dimensions and the locations of planes."""
    placed = (one for parts in page.placed for one in parts)
    planes = ",".join(f"{p.plane.name}:{p.plane.dtype}:{p.offset_bytes}" for p in placed)
    codecs = [plane.codec.fingerprint for plane in page.planes]
    vectors = [(plane.name, plane.heads, plane.width) for plane in page.planes]
    if vectors != [(name, page.heads, page.head_dim) for name in (KEY, VALUE)]:
        planes += f" vectors={vectors}"
    return (
        f"{' / '.join(codecs)}; head_dim={page.head_dim} heads={page.heads} tokens={page.tokens} "
        f"positions={page.positions} rotated={page.rotated} "
        + ("joined=True " if page.joined else "")
        + f"layers={page.layers} planes={planes} "
        f"page_bytes={page.page_bytes}"
    )


# Lane groups that KV offload supports, and their bytes per token.

SLOTS = 2  # staging slots: attention reads one while the other is filled for the next layer


def offloaded_token_bytes(layout: CacheLayout) -> int:
    """Return the bytes of one token of an offloaded prefix, in all lanes that support offload."""
    groups = [group for group in layout.groups if can_be_offloaded(group)]
    per_page = [(g.num_lanes * g.page_class.page_bytes, g.page_class.tokens) for g in groups]
    return sum(-(-page_bytes // tokens) for page_bytes, tokens in per_page)


def classes_with_bounds(layout: CacheLayout) -> tuple[PageClass, ...]:
    """Return the classes of pages that can be offloaded and have bounds of their keys."""
    groups = (group for group in layout.groups if can_be_offloaded(group))
    return tuple(dict.fromkeys(g.page_class for g in groups if g.page_class.has_bounds))


def offloaded_bounds_bytes(layout: CacheLayout, offload_bytes: int) -> int:
    """Return the bytes of the bounds of all pages in offload memory of this size."""
    return sum(
        (offload_bytes // page_class.page_bytes + 1) * page_class.bounds_bytes
        for page_class in classes_with_bounds(layout)
    )


def usable_offload_bytes(layout: CacheLayout, kv_bytes: int) -> int:
    """Return the offload memory for which a KV memory has room for staging and bounds."""
    groups = [group for group in layout.groups if can_be_offloaded(group)]
    offloaded = sum(group.num_lanes * group.page_class.page_bytes for group in groups)
    staged = sum(SLOTS * g.lanes_per_layer * g.page_class.page_bytes for g in groups)
    bounds = sum(group.num_lanes * group.page_class.bounds_bytes for group in groups)
    return kv_bytes * offloaded // (staged + bounds)


def can_be_offloaded(group: LaneGroup) -> bool:
    """Return whether the first pages of a group's lanes can be offloaded and this frees memory."""
    if group.private or group.bounded or group.readers > 1:
        return False
    return len(group.layers) > SLOTS
