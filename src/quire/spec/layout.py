"""From a model's shape to the lane groups of its sequences."""

from quire.spec.model import ModelSpec
from quire.spec.pages import CacheLayout, LaneGroup, PageClass, codec_spec


def layout_for(
    model: ModelSpec, *, codec: str, page_tokens: int, evicting: bool = False
) -> CacheLayout:
    """One group for all layers with full attention, one for each sliding window.

    Args:
        model: heads, dims and windows.
        codec: how keys and values are stored.
        page_tokens: slots in a page.
        evicting: lanes of full attention will lose tokens one by one: they give up slot order and
            carry positions. Window lanes stay ordered; they are bounded by their window already.
    """
    numbers = codec_spec(codec)
    windows = sorted({layer.window for layer in model.layers if layer.window is not None})
    groups = []
    for window in (None, *windows):
        layers = tuple(i for i, layer in enumerate(model.layers) if layer.window == window)
        loses_order = evicting and window is None
        page_class = PageClass(
            key=numbers,
            value=numbers,
            head_dim=model.head_dim,
            heads=model.num_kv_heads,
            tokens=page_tokens,
            positions=loses_order,
        )
        if layers:
            name = "full" if window is None else f"window_{window}"
            groups.append(
                LaneGroup(
                    name=name,
                    page_class=page_class,
                    layers=layers,
                    window=window,
                    ordered=not loses_order,
                )
            )
    return CacheLayout(tuple(groups))
