"""With `batch_invariant` the fused and the quantized layers give each row the same bits."""

from dataclasses import replace

import pytest
import torch

from quire.kernels import select
from quire.kernels.native.library import PATHS, NativeLibrary, load_library
from quire.kernels.native.linear import Products
from quire.models import adapter, loader
from quire.models.loader import make_decoder
from quire.models.native.decoder import NativeDecoder
from quire.models.native_linear import available_products
from support import zoo
from support.invariance import check, model_of

pytestmark = pytest.mark.skipif(
    not isinstance(load_library(), NativeLibrary), reason="the C extension is not built"
)


@pytest.mark.skipif(available_products() is None, reason="no products of the C extension")
@pytest.mark.parametrize("path", range(1, len(PATHS)), ids=PATHS[1:])
@pytest.mark.parametrize("pages", ["none", "int8"])
@pytest.mark.parametrize("weights", ["auto", "int8", "int4"])
def test_no_batch_changes_a_bit_in_the_native_decoder(weights, pages, path, monkeypatch):
    library = load_library()
    if path > library.path:
        pytest.skip("this CPU has no such instructions")
    limited = replace(library, path=path)
    monkeypatch.setattr(select, "tested_library", lambda: limited)
    monkeypatch.setattr(loader, "load_library", lambda: limited)
    for name in ("available_products", "fastest_products"):
        monkeypatch.setattr(adapter, name, lambda: Products(limited))
    plain = zoo.build("qwen3").to(torch.bfloat16)
    decoder = make_decoder(plain, None, impl="native", codec=weights)
    model = replace(model_of("qwen3"), decoder=decoder, weight_codec=weights)
    assert isinstance(decoder, NativeDecoder)

    assert check(model, range(0, 4, 2), {"codec": pages}) > 0


@pytest.mark.skipif(available_products() is None, reason="no products of quantized weights")
@pytest.mark.parametrize(
    ("architecture", "impl", "codec"),
    [
        ("qwen3", "native", "int4"),
        pytest.param("qwen3", "native", "int8", marks=pytest.mark.slow),
        pytest.param("llama", "transformers", "int8", marks=pytest.mark.slow),
        pytest.param("gpt2", "transformers", "int4", marks=pytest.mark.slow),
    ],
)
def test_no_batch_changes_a_bit_with_quantized_weights(architecture, impl, codec):
    plain = zoo.build(architecture).to(torch.bfloat16)
    decoder = make_decoder(plain, None, impl=impl, codec=codec)
    model = replace(model_of(architecture), decoder=decoder, weight_codec=codec)

    assert check(model, range(2)) > 0
