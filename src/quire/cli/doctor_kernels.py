"""Kernels that this processor gets, for `quire doctor`: which one runs each operation, and why."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quire.layout.sizes import HUGE_PAGE_BYTES

if TYPE_CHECKING:
    from quire.kernels.native.library import NativeLibrary, NotLoaded

_WEIGHT_TYPES = ("float32", "bfloat16", "float16", "int8", "int4")
_HEAD_DIM, _SCRATCH_BYTES = 64, 1 << 20
_C_EXTENSION = "C extension, "
_KERNELS = {
    "native": "C extension (native)",
    "triton": "Triton (triton)",
    "gathered": "PyTorch (gathered)",
}
"""Kernels of attention by the name of their backend, the value of --attention."""
_NO_CODE = "the C extension has no code for these codecs: PyTorch decodes copies of the pages"
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_CPU_FLAGS = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelUse:
    """The kernel of one operation.

    Attributes:
        operation: such as `linear layers`.
        storage: type or codec of the weights or the KV; "" if it does not matter.
        kernel: what runs it; "none" if the operation is not possible.
        reason: why this kernel is selected, or why a faster one is not.
    """

    operation: str
    storage: str
    kernel: str
    reason: str

    @property
    def text(self) -> str:
        """Kernel and reason."""
        return f"{self.kernel} ({self.reason})"


def kernel_uses() -> Iterator[KernelUse]:
    """Yield the kernel of each operation on a CPU."""
    from quire.kernels.native.library import load_library

    library = load_library()
    missing = why_missing(library)
    for storage in _WEIGHT_TYPES:
        yield _linear(library, storage, missing)
    if missing is None:
        yield _use("RMSNorm and RoPE", "", "C extension", "in the native decoder")
    else:
        yield _use("RMSNorm and RoPE", "", "modules of Transformers", missing)
    yield from _attention()
    yield _prefill(library)
    yield _sampling(missing)


def why_missing(library: "NativeLibrary | NotLoaded") -> str | None:
    """Return why the C extension runs no linear layers; None if it does."""
    from quire.kernels.native.library import NotLoaded
    from quire.kernels.native.linear import has_products

    if isinstance(library, NotLoaded):
        return library.reason
    if not has_products(library):
        return "the processor has neither AVX2 nor AVX-512, or QUIRE_MAX_CPU_ISA excludes them"
    return None


def instruction_set() -> tuple[str, bool]:
    """Highest instruction set that the C extension uses, or why it is missing; and if it runs."""
    import os

    from quire.kernels.native.library import MAX_CPU_ISA, NotLoaded, load_library

    library = load_library()
    if isinstance(library, NotLoaded):
        return f"the C extension is not used: {library.reason}", False
    limit = os.environ.get(MAX_CPU_ISA)
    limited = f" (limited by {MAX_CPU_ISA}={limit})" if limit else ""
    return f"{_reason(library.description)}{limited}", True


def huge_pages(path: Path = _HUGE_PAGES) -> str:
    """Whether weights and KV can be placed in huge pages; `path` is the system's setting."""
    if not path.is_file():
        return f"not available: this system has no {path}"
    choices = path.read_text(encoding="ascii").split()
    chosen = next((name.strip("[]") for name in choices if name.startswith("[")), "unknown")
    if chosen not in ("always", "madvise"):
        return (
            f"not available: {path} is {chosen}; with madvise, reading weights takes fewer "
            "address translations"
        )
    return f"available ({chosen}), {HUGE_PAGE_BYTES >> 20} MiB; packed weights and KV use them"


def _use(operation: str, storage: str, kernel: str, reason: str) -> KernelUse:
    return KernelUse(operation=operation, storage=storage, kernel=kernel, reason=reason)


def _linear(library: "NativeLibrary | NotLoaded", storage: str, missing: str | None) -> KernelUse:
    from quire.kernels.native.library import NotLoaded
    from quire.kernels.native.linear import CODED
    from quire.models.native_linear import fastest_products

    operation = "linear layers"
    if missing is not None or isinstance(library, NotLoaded):
        why = f"not the C extension: {missing}"
        kernel = "none" if storage in CODED else _torch_linear(storage)
        return _use(operation, storage, kernel, why)
    if storage not in CODED and fastest_products() is None:
        why = "not the C extension: oneDNN's products were faster when measured on this processor"
        return _use(operation, storage, _torch_linear(storage), why)
    return _use(operation, storage, "C extension", _arithmetic(library, storage))


def _arithmetic(library: "NativeLibrary", storage: str) -> str:
    """How the C extension multiplies a weight."""
    from quire.kernels.native.linear_args import AVX2, AVX512_BF16

    if storage == "float32":
        return "float32 products"
    if storage == "float16":
        return "stored as float32, float32 products"
    if storage == "bfloat16":
        if library.path == AVX512_BF16:
            return "bfloat16 products"
        return "no bfloat16 products: widened to float32 in registers"
    if library.path != AVX2 and has_vnni():
        return "int8 products (VNNI), activations as int8"
    return "no VNNI: products of 16-bit sums, activations as int8"


def has_vnni() -> bool:
    """Whether the processor has AVX-512 VNNI."""
    text = _CPU_FLAGS.read_text(errors="replace") if _CPU_FLAGS.is_file() else ""
    return "avx512_vnni" in text.split()


def _torch_linear(storage: str) -> str:
    """What runs a linear layer without the C extension; as `prepare_linears` selects."""
    import torch

    from quire.models.linear_weights import can_reorder, multiplies

    if storage == "bfloat16" and can_reorder():
        return "oneDNN, weights in its order"
    if storage != "float32" and not multiplies(getattr(torch, storage)):
        return "torch, float32 copies of the weights"
    return "torch"


def _attention() -> Iterator[KernelUse]:
    """Attention of decode steps by the type or codec of the KV."""
    import torch

    from quire.errors import QuireError
    from quire.kernels.select import select_backend
    from quire.layout.codec_names import CODECS

    operation, cpu = "attention, decode", torch.device("cpu")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        choice = select_backend(
            "auto", cpu, dtype=dtype, head_dim=_HEAD_DIM, scratch_bytes=_SCRATCH_BYTES
        )
        plain = choice.backend.name
        storage = str(dtype).removeprefix("torch.")
        yield _use(operation, storage, _KERNELS[plain], _reason(choice.reason))
    for codec in CODECS:
        if codec in ("bfloat16", "float16", "float32"):
            continue
        try:
            choice = select_backend(
                "auto",
                cpu,
                dtype=torch.bfloat16,
                head_dim=_HEAD_DIM,
                scratch_bytes=_SCRATCH_BYTES,
                codec=codec,
            )
        except QuireError as error:
            yield _use(operation, codec, "none", str(error))
        else:
            name = choice.backend.name
            has_no_code = plain == "native" and name == "gathered"
            reason = _NO_CODE if has_no_code else _reason(choice.reason)
            yield _use(operation, codec, _KERNELS[name], reason)


def _reason(text: str) -> str:
    """The reason without the name of the kernel, which has its own column."""
    return text.removeprefix(_C_EXTENSION)


def _prefill(library: "NativeLibrary | NotLoaded") -> KernelUse:
    from quire.kernels.native.library import NotLoaded

    operation = "attention, prefill"
    if isinstance(library, NotLoaded):
        return _use(operation, "", _KERNELS["gathered"], f"not native: {library.reason}")
    blocks = int(library.block_queries(library.path, _HEAD_DIM))
    if blocks:
        why = f"blocks of {blocks} queries directly from the pages"
        return _use(operation, "", _KERNELS["native"], why)
    why = "the C extension has no blocks for this processor"
    return _use(operation, "", _KERNELS["gathered"], why)


def _sampling(missing: str | None) -> KernelUse:
    if missing is not None:
        return _use("sampling", "", "torch", f"not the C extension: {missing}")
    why = "temperature, top-k, top-p, min-p and the draw, row by row"
    return _use("sampling", "", "C extension", why)
