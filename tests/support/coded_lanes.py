"""Pages in codes beside the same numbers decoded, everything that is not live poisoned."""

from dataclasses import replace

import torch

from quire.kernels.coded import decode_slots
from quire.kv.store import PageStore
from quire.layout.codec_names import codec_pair
from quire.layout.pages import kv_pages


def coded_twin(lanes, codec):
    """Pages of codes with what float32 `Lanes` hold, which then hold what these decode to."""
    key, value = codec_pair(codec)
    num_pages, heads, tokens, head_dim = lanes.pages.key.shape
    shape = {"head_dim": head_dim, "value_dim": lanes.pages.value.shape[3]}
    page_class = kv_pages(key=key, value=value, heads=heads, tokens=tokens, **shape)
    store = PageStore(num_pages * page_class.page_bytes, torch.device("cpu"))
    store.arena.fill_(255)  # not a number as float16 and float32
    views = store.views(page_class)
    live = ~lanes.pages.key[:, 0, :, 0].isnan()
    page, offset = live.nonzero(as_tuple=True)
    for plain, coded in (
        (lanes.pages.key, views.coded.key),
        (lanes.pages.value, views.coded.value),
    ):
        made = coded.codec.encode(plain[page, :, offset][:, :, None])
        for plane, codes in zip(coded.planes, made, strict=True):
            plane[page, :, offset] = codes.squeeze(-2)
        plain[page, :, offset] = decode_slots(coded, page, offset)
    return replace(lanes.pages, key=views.key, value=views.value, coded=views.coded)
