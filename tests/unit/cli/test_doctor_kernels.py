"""Kernels that `quire doctor` lists, for every instruction set of this processor."""

from dataclasses import replace
from pathlib import Path

import pytest

from quire.cli import doctor
from quire.cli.doctor import KernelUse, huge_pages, instruction_set, kernel_uses
from quire.kernels.native import library as library_module
from quire.kernels.native import sampling
from quire.kernels.native.arguments import AVX2, AVX512, AVX512_BF16, PLAIN
from quire.kernels.native.library import MAX_CPU_ISA, NativeLibrary, NotLoaded, load_library
from quire.layout.codec_names import CODECS

LIBRARY = load_library()
NO_PRODUCTS = NotLoaded("no C compiler")
needs_products = pytest.mark.skipif(
    not isinstance(LIBRARY, NativeLibrary) or LIBRARY.path == PLAIN,
    reason="no C extension with vector instructions",
)


def uses_with(
    monkeypatch: pytest.MonkeyPatch, library: NativeLibrary | NotLoaded
) -> dict[tuple[str, str], KernelUse]:
    monkeypatch.setattr(library_module, "load_library", lambda: library)
    return {(use.operation, use.storage): use for use in kernel_uses()}


def on_path(path: int) -> NativeLibrary:
    assert isinstance(LIBRARY, NativeLibrary)
    if path > LIBRARY.path:
        pytest.skip("not an instruction set of this processor")
    return replace(LIBRARY, path=path)


@needs_products
@pytest.mark.parametrize(
    ("path", "arithmetic"),
    [(AVX2, "widened to float32"), (AVX512, "widened to float32"), (AVX512_BF16, "bfloat16 prod")],
)
def test_bfloat16_weights_name_the_arithmetic(
    monkeypatch: pytest.MonkeyPatch, path: int, arithmetic: str
) -> None:
    uses = uses_with(monkeypatch, on_path(path))

    assert uses["linear layers", "bfloat16"].kernel == "C extension"
    assert arithmetic in uses["linear layers", "bfloat16"].reason
    assert uses["linear layers", "float32"].reason == "float32 products"
    assert ("(VNNI)" in uses["linear layers", "int8"].reason) == (
        path != AVX2 and doctor.has_vnni()
    )


def test_without_the_c_extension_the_replacement_and_reason_are_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    uses = uses_with(monkeypatch, NO_PRODUCTS)

    for storage in ("float32", "bfloat16", "float16"):
        assert "no C compiler" in uses["linear layers", storage].reason
        assert uses["linear layers", storage].kernel.startswith(("torch", "oneDNN"))
    for codec in ("int8", "int4"):
        assert uses["linear layers", codec].kernel == "none"
    assert uses["RMSNorm and RoPE", ""].kernel == "modules of Transformers"
    assert uses["sampling", ""].text == "torch (not the C extension: no C compiler)"
    assert uses["attention, prefill", ""].kernel == "PyTorch (gathered)"


@needs_products
def test_plain_c_has_no_linear_layers_and_no_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    uses = uses_with(monkeypatch, on_path(PLAIN))

    assert "neither AVX2 nor AVX-512" in uses["linear layers", "float32"].reason
    assert uses["sampling", ""].kernel == "torch"
    assert "neither AVX2 nor AVX-512" in uses["sampling", ""].reason


@needs_products
@pytest.mark.parametrize("path", [AVX2, AVX512, AVX512_BF16])
def test_sampling_runs_where_the_engine_samples(monkeypatch: pytest.MonkeyPatch, path: int) -> None:
    monkeypatch.setattr(sampling, "load_library", lambda: on_path(path))

    assert sampling.row_sampling() is not None
    assert uses_with(monkeypatch, on_path(path))["sampling", ""].kernel == "C extension"


def test_every_kv_codec_is_listed() -> None:
    listed = {use.storage for use in kernel_uses() if use.operation == "attention, decode"}

    assert set(CODECS) | {"float32", "bfloat16", "float16"} <= listed


@needs_products
def test_a_limited_instruction_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MAX_CPU_ISA, "avx2")

    text, runs = instruction_set()

    assert "limited by QUIRE_MAX_CPU_ISA=avx2" in text
    assert runs


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("always [madvise] never\n", "available (madvise), 2 MiB"),
        ("always madvise [never]\n", "not available"),
        (None, "not available: this system has no"),
    ],
)
def test_huge_pages(tmp_path: Path, text: str | None, expected: str) -> None:
    path = tmp_path / "enabled"
    if text is not None:
        path.write_text(text)

    assert huge_pages(path).startswith(expected)


@needs_products
def test_codecs_without_code_have_one_reason() -> None:
    uses = [use for use in kernel_uses() if use.operation == "attention, decode"]

    assert len({(use.kernel, use.reason) for use in uses}) == 2
    assert {use.kernel for use in uses} == {"C extension (native)", "PyTorch (gathered)"}
