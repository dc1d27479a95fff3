"""Attention to codes in C, compared with attention that decodes them while it gathers."""

import pytest

from quire.kernels.native.library import NativeLibrary, load_library
from reference.test_eviction import largest_difference
from reference.test_eviction_engine import run
from support.engines import make_prompts

MODEL = "qwen3"  # heads of 16 numbers
JOBS = {f"r{i}": (prompt, "full") for i, prompt in enumerate(make_prompts(2, 60, seed=3))}

pytestmark = pytest.mark.skipif(
    not isinstance(load_library(), NativeLibrary), reason="the C extension is not built"
)


@pytest.mark.parametrize("codec", ["int8", "int4/int8", "int4_outliers"])
@pytest.mark.parametrize("chunk_tokens", [7, 64])
def test_c_gives_the_logits_of_the_gathered_backend(codec, chunk_tokens):
    """A value between two codes may be rounded to either: see tests/support/exact_products.py."""
    kv = {"codec": codec, "enable_prefix_caching": False}
    found = [
        run(JOBS, model=MODEL, kv=kv | {"attention": name}, chunk_tokens=chunk_tokens)
        for name in ("native", "gathered")
    ]

    assert found[0].engine.pool.kv.backend.name == "native"
    assert largest_difference(found[0].logits, found[1].logits) <= 0.05
