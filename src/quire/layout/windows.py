"""Which layers of a model see everything and which see a sliding window.

Configurations say it in five ways, read here in this order: `use_sliding_window: false`, a list
`layer_types`, GPT-Neo's `attention_types`, a period `sliding_window_pattern` whose last layer is
full, and `max_window_layers` below which all are full. Else `sliding_window` is for all layers.
"""

from collections.abc import Iterable, Iterator, Sequence

from quire.errors import ModelError, UnsupportedModel
from quire.layout.config import MOST_LAYERS, ConfigReader, shown
from quire.layout.families import WINDOW_IGNORED

_KINDS = {
    "full_attention": False,
    "global": False,
    "attention": False,
    "sliding_attention": True,
    "local": True,
}


def read_windows(reader: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    """The sliding window of each layer in tokens; None where a layer is full.

    A window W means that a query at position p sees the positions > p - W, itself included.

    Raises:
        ModelError: the list of layers has another length, or a window layer has no window.
        UnsupportedModel: a layer that is neither full nor sliding-window attention.
    """
    if not reader.flag("use_sliding_window", default=True):
        return (None,) * num_layers
    window = _window(reader)
    sliding = _sliding(reader, num_layers, windowed=window is not None)
    if window is None and any(sliding):
        raise reader.missing("sliding_window")
    return tuple(window if slides else None for slides in sliding)


def _window(reader: ConfigReader) -> int | None:
    if reader.model_type in WINDOW_IGNORED:
        return None
    # null is "no window", an absent key is the family's default; 0 is how old files wrote null
    if reader.is_null("sliding_window"):
        return None
    return reader.optional_integer("sliding_window", "window_size") or None


def _sliding(reader: ConfigReader, num_layers: int, *, windowed: bool) -> Sequence[bool]:
    kinds = _kinds(reader)
    if kinds is not None:
        if len(kinds) != num_layers:
            raise ModelError(
                f"config.json names the attention of {len(kinds)} layers, but the model has"
                f" {num_layers}: make 'layer_types' and 'num_hidden_layers' agree"
            )
        return [_slides(kind) for kind in kinds]
    if not windowed:
        return [False] * num_layers
    period = reader.optional_integer("sliding_window_pattern", "_sliding_window_pattern")
    if period:
        return [(layer + 1) % period != 0 for layer in range(num_layers)]
    first = reader.optional_integer("max_window_layers") or 0
    return [layer >= first for layer in range(num_layers)]


def _kinds(reader: ConfigReader) -> list[object] | None:
    kinds = reader.sequence("layer_types", "attention_layers")
    if kinds is not None:
        return kinds
    pairs = reader.sequence("attention_types")
    if pairs is None:
        return None
    # GPT-Neo: [[["global", "local"], 12]] repeats the inner list twelve times
    return [kind for pair in pairs for kind in _repeated(pair)]


def _repeated(pair: object) -> Iterator[object]:
    match pair:
        case [cycle, int(times)] if 0 <= times <= MOST_LAYERS:
            for _ in range(times):
                yield from _listed(cycle)
        case _:
            raise ModelError(
                f"config.json: 'attention_types' holds {shown(pair)}, expected pairs of a list of "
                "layer types and how often it repeats"
            )


def _listed(cycle: object) -> Iterable[object]:
    return cycle if isinstance(cycle, list) else [cycle]


def _slides(kind: object) -> bool:
    if not isinstance(kind, str) or kind not in _KINDS:
        raise UnsupportedModel(
            f"a layer of type {kind!r}: Quire holds the KV of {', '.join(_KINDS)} layers only"
        )
    return _KINDS[kind]
