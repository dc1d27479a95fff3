"""`quire doctor`: kernels for every instruction set of this processor; the QuireCache check."""

import inspect
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

from quire.cli import doctor
from quire.cli.doctor import (
    KernelUse,
    examine,
    generate_with_cache,
    huge_pages,
    instruction_set,
    kernel_uses,
)
from quire.errors import InvariantError
from quire.hf.cache_rows import CacheRows
from quire.kernels.native import library as library_module
from quire.kernels.native import sampling
from quire.kernels.native.arguments import AVX2, AVX512, AVX512_BF16, PLAIN
from quire.kernels.native.library import MAX_CPU_ISA, NativeLibrary, NotLoaded, load_library
from quire.layout.codec_names import CODECS
from quire.models import wrapped
from quire.models.wrapped import cache_argument

LIBRARY = load_library()
needs_products = pytest.mark.skipif(
    not isinstance(LIBRARY, NativeLibrary) or LIBRARY.path == PLAIN,
    reason="no C extension with vector instructions",
)


def uses_with(monkeypatch, library: NativeLibrary | NotLoaded) -> dict[tuple[str, str], KernelUse]:
    monkeypatch.setattr(library_module, "load_library", lambda: library)
    return {(use.operation, use.storage): use for use in kernel_uses()}


def on_path(path: int) -> NativeLibrary:
    assert isinstance(LIBRARY, NativeLibrary)
    if path > LIBRARY.best_path:
        pytest.skip("not an instruction set of this processor")
    return replace(LIBRARY, path=path)


@needs_products
@pytest.mark.parametrize(
    ("path", "arithmetic"),
    [(AVX2, "widened to float32"), (AVX512, "widened to float32"), (AVX512_BF16, "bfloat16 prod")],
)
def test_bfloat16_weights_name_the_arithmetic(monkeypatch, path: int, arithmetic: str):
    uses = uses_with(monkeypatch, on_path(path))

    assert uses["linear layers", "bfloat16"].kernel == "C extension"
    assert arithmetic in uses["linear layers", "bfloat16"].reason
    assert uses["linear layers", "float32"].reason == "float32 products"
    monkeypatch.setenv(MAX_CPU_ISA, "avx2")
    text, runs = instruction_set()
    assert "limited by QUIRE_MAX_CPU_ISA=avx2" in text
    assert runs
    has_vnni = path != AVX2 and doctor.has_vnni()
    assert ("(VNNI)" in uses["linear layers", "int8"].reason) == has_vnni


def test_without_the_c_extension_the_replacement_and_reason_are_listed(monkeypatch):
    uses = uses_with(monkeypatch, NotLoaded("no C compiler"))

    for storage in ("float32", "bfloat16", "float16"):
        assert "no C compiler" in uses["linear layers", storage].reason
        assert uses["linear layers", storage].kernel.startswith(("torch", "oneDNN"))
    for codec in ("int8", "int4"):
        assert uses["linear layers", codec].kernel == "none"
    assert uses["RMSNorm and RoPE", ""].kernel == "modules of Transformers"
    assert uses["sampling", ""].text == "torch (not the C extension: no C compiler)"
    assert uses["attention, prefill", ""].kernel == "PyTorch (gathered)"


@needs_products
def test_plain_c_has_no_linear_layers_and_no_sampling(monkeypatch):
    uses = uses_with(monkeypatch, on_path(PLAIN))
    assert "neither AVX2 nor AVX-512" in uses["linear layers", "float32"].reason
    assert uses["sampling", ""].kernel == "torch"
    assert "neither AVX2 nor AVX-512" in uses["sampling", ""].reason


@needs_products
@pytest.mark.parametrize("path", [AVX2, AVX512, AVX512_BF16])
def test_sampling_runs_where_the_engine_samples(monkeypatch, path: int):
    monkeypatch.setattr(sampling, "load_library", lambda: on_path(path))
    assert sampling.row_sampling() is not None
    assert uses_with(monkeypatch, on_path(path))["sampling", ""].kernel == "C extension"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("always [madvise] never\n", "available (madvise), 2 MiB"),
        ("always madvise [never]\n", "not available"),
        (None, "not available: this system has no"),
    ],
)
def test_huge_pages(tmp_path: Path, text: str | None, expected: str):
    path = tmp_path / "enabled"
    if text is not None:
        path.write_text(text)
    assert huge_pages(path).startswith(expected)


@needs_products
def test_every_kv_codec_is_listed_and_those_without_code_have_one_reason():
    uses = [use for use in kernel_uses() if use.operation == "attention, decode"]
    assert set(CODECS) | {"float32", "bfloat16", "float16"} <= {use.storage for use in uses}
    assert len({(use.kernel, use.reason) for use in uses}) == 2
    assert {use.kernel for use in uses} == {"C extension (native)", "PyTorch (gathered)"}


def test_check_names_the_argument_of_this_version():
    name = cache_argument(inspect.signature(LlamaForCausalLM.forward).parameters)
    assert f"model.generate(..., {name}=QuireCache(model))" in generate_with_cache()


def test_wrong_output_fails_the_check(monkeypatch):
    forward = CacheRows.forward
    monkeypatch.setattr(CacheRows, "forward", lambda *given: -forward(*given))
    with pytest.raises(InvariantError, match="differs from"):
        generate_with_cache()


@pytest.mark.slow
def test_version_that_names_the_cache_otherwise_fails_the_check_only(monkeypatch):
    name = cache_argument(inspect.signature(LlamaForCausalLM.forward).parameters)
    monkeypatch.setattr(wrapped, "CACHE_ARGUMENTS", ("another_name",))
    monkeypatch.setattr(wrapped, "cache_argument", lambda _: name)

    found = {finding.name: finding for finding in examine()}

    assert not found["QuireCache"].ok
    assert "QuireCache works only in" in found["QuireCache"].value
    assert found["test request"].ok
