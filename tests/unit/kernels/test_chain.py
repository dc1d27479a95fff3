"""Chains of C calls: results, and the time of each component if it is requested."""

import time

import pytest
import torch

from quire.kernels.native.chain import CHAIN_PARTS, Chain, PartTimes, RowFunctions
from quire.kernels.native.library import NativeLibrary, load_library
from quire.kernels.native.linear import Products, has_products, pack, set_input, set_output

LIBRARY = load_library()

pytestmark = pytest.mark.skipif(
    not isinstance(LIBRARY, NativeLibrary) or not has_products(LIBRARY),
    reason="no C extension with vector instructions",
)


class NormAndProduct:
    """RMSNorm, then a product with a weight of 256 KiB."""

    def __init__(self) -> None:
        assert isinstance(LIBRARY, NativeLibrary)
        generator = torch.Generator().manual_seed(0)
        self.x, self.out = torch.randn(8, 256, generator=generator), torch.zeros(8, 256)
        self.weight, self.ones = torch.randn(256, 256, generator=generator), torch.ones(256)
        self._normed = torch.empty(8, 256)
        self._packed = pack(self.weight, "float32")
        product = Products(LIBRARY).linear_args(self._packed)
        set_input(product, self._normed)
        set_output(product, self.out)
        norm = RowFunctions(LIBRARY.path).norm(self.x, self.ones, 1e-6, self._normed)
        self.chain = Chain(LIBRARY, ("norms and RoPE", [norm]), ("mlp", [product]))
        self.chain.set_rows(8)

    def expected(self) -> torch.Tensor:
        normed = torch.nn.functional.rms_norm(self.x, (256,), self.ones, 1e-6)
        return normed @ self.weight.T


@pytest.mark.parametrize("times", [None, PartTimes()], ids=["untimed", "timed"])
def test_calls_run_in_order(times: PartTimes | None) -> None:
    calls = NormAndProduct()
    calls.chain.run(times)

    torch.testing.assert_close(calls.out, calls.expected(), rtol=1e-4, atol=1e-3)


def test_times_are_added_to_the_components_of_the_calls() -> None:
    calls, times = NormAndProduct(), PartTimes()
    started_s = time.perf_counter()
    for _ in range(50):
        calls.chain.run(times)
    whole_s = time.perf_counter() - started_s
    found = times.seconds()

    assert list(found) == list(CHAIN_PARTS)
    assert [part for part, part_s in found.items() if part_s] == ["mlp", "norms and RoPE"]
    assert 0 < sum(found.values()) <= whole_s
    calls.chain.run()
    assert times.seconds() == found  # a run without times adds nothing
    times.reset()
    assert not any(times.seconds().values())
