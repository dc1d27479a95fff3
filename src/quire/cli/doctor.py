"""`quire doctor`: shows versions, hardware and selected backends, and runs self-tests.

One test is a `model.generate` of Transformers with a QuireCache: versions of Transformers differ in
what they pass to a cache, and the engine can work with a version with which `quire.hf` does not.
"""

import inspect
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quire.cli.common import json_option
from quire.cli.completion import complete_model
from quire.cli.report import envelope, hardware, print_json, versions
from quire.cli.settings import with_flags
from quire.cli.startup import fast_imports, status
from quire.errors import InvariantError, QuireError
from quire.layout.sizes import HUGE_PAGE_BYTES, format_size

if TYPE_CHECKING:
    from quire.kernels.native.library import NativeLibrary, NotLoaded
    from quire.models.loader import LoadedModel

_CPU_FEATURES = (
    *("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16"),
    *("amx_tile", "amx_int8", "amx_bf16", "asimd", "sve"),
)
_SCRATCH_BYTES = 1 << 20
_TEST_TOKENS = 256
_FAILURES = (QuireError, OSError, RuntimeError, ImportError, TypeError, ValueError, AttributeError)
"""Errors that fail a check; the last three: an interface of a package that has changed."""
_OFF = "--"
"""Mark of an optional component that is missing."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    name: str
    value: str  # what was found, or the error
    ok: bool = True
    mark: str = "ok"  # of a check that passed


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorFlags:
    """Options of `quire doctor`."""

    as_json: bool = json_option()


@with_flags
def doctor(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            autocompletion=complete_model,
            help="Load this model too, and show which implementation it gets. Default: only the "
            "packaged model.",
            show_default=False,
        ),
    ] = None,
    *,
    flags: DoctorFlags,
) -> None:
    """Show versions, hardware and kernels, and test the packaged model.

    Lists which kernel this processor gets for each operation, and why. Exit code 1 if a check
    fails.
    """
    with status("testing this machine and the packaged model"):
        with fast_imports():
            import quire.api.llm  # noqa: F401 - the checks use it
        findings = list(examine(model))
        uses = list(kernel_uses())
    _show(findings)
    _show_kernels(uses)
    healthy = all(finding.ok for finding in findings)
    if flags.as_json:
        claims = {"healthy": int(healthy)}
        arms = {
            "findings": [asdict(finding) for finding in findings],
            "kernels": [asdict(use) for use in uses],
        }
        print_json(envelope("doctor", claims, arms, {}))
    if not healthy:
        raise typer.Exit(1)


def examine(model: str | None = None) -> Iterator[Finding]:
    """Run all checks, the cheap ones first."""
    for name, version in versions().items():
        yield Finding(name, version or "not installed", ok=version is not None)
    yield from _machine()
    yield from _torch()
    yield from _attention()
    yield from _disk()
    yield from _model()
    if model is not None:
        yield model_finding(model)


def cpu_features(cpuinfo: str) -> list[str]:
    """Instruction sets that Quire's kernels can use, from the text of /proc/cpuinfo."""
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            flags = set(value.split())
            return [name for name in _CPU_FEATURES if name in flags]
    return []


def _machine() -> Iterator[Finding]:
    import psutil

    from quire.kernels.memory import keep_freed_memory

    found = hardware()
    yield Finding("system", platform.platform())
    yield Finding("processor", f"{found['cpu']}, {found['cores']} cores for this process")
    cpuinfo = Path("/proc/cpuinfo")
    features = cpu_features(cpuinfo.read_text(errors="replace")) if cpuinfo.is_file() else []
    yield Finding("instructions", ", ".join(features) or "unknown")
    text, runs = instruction_set()
    yield Finding("C extension", text, mark="ok" if runs else _OFF)
    pages = huge_pages()
    yield Finding("huge pages", pages, mark=_OFF if pages.startswith("not") else "ok")
    memory = psutil.virtual_memory()
    yield Finding("memory", f"{format_size(memory.available)} free of {format_size(memory.total)}")
    yield Finding("freed memory", keep_freed_memory().explanation)


def _torch() -> Iterator[Finding]:
    import torch

    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        device = f"cuda: {properties.name}, {format_size(properties.total_memory)}"
    else:
        device = "cpu (PyTorch finds no CUDA device)"
    yield Finding("device", device)
    yield Finding(
        "threads", f"{torch.get_num_threads()} (PyTorch's default; --threads in other commands)"
    )


def _attention() -> Iterator[Finding]:
    import torch

    from quire.kernels.select import BACKENDS, select_backend

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for name in ("auto", *BACKENDS):
        try:
            choice = select_backend(
                name, device, dtype=dtype, head_dim=64, scratch_bytes=_SCRATCH_BYTES
            )
        except QuireError as error:
            yield Finding(
                f"attention {name}", f"not available: {error}", ok=name != "auto", mark=_OFF
            )
        else:
            if name == "auto":
                yield Finding(f"attention {name}", f"{choice.backend.name}: {choice.reason}")
                continue
            _, _, advice = choice.reason.partition("; ")  # "slow, for comparison"
            available = "; ".join(filter(None, (f"available: --attention {name}", advice)))
            yield Finding(f"attention {name}", available)


def _disk() -> Iterator[Finding]:
    def check_tier() -> str:
        from quire.offload.tiers.file import FileTier

        with TemporaryDirectory() as folder:
            tier = FileTier(Path(folder), _SCRATCH_BYTES)
            written, found = bytes(range(256)), bytearray(256)
            tier.write("trial", written)
            tier.read("trial", memoryview(found))
            tier.close()
        if bytes(found) != written:
            raise InvariantError("data read from a disk tier differ from the data written")
        how = "direct I/O" if tier.direct else "through the page cache"
        return f"prefixes can be stored on disk, {how} in {gettempdir()}"

    yield _tried("disk tier", check_tier)


def _model() -> Iterator[Finding]:
    loaded: list[LoadedModel] = []

    def load() -> str:
        loaded.append(_loaded("quire-tiny", dtype="float32", device="cpu"))
        return _described(loaded[0])

    yield _tried("packaged model", load)
    if loaded:
        yield _tried("weight offload", lambda: _offloaded(loaded[0].weight_bytes // 2))
        yield _tried("test request", lambda: _test_request(loaded[0]))
        yield _tried("QuireCache", generate_with_cache)


def model_finding(path: str) -> Finding:
    """Load a model, compare it with Transformers, and show its implementation."""
    return _tried(f"model {path}", lambda: _described(_loaded(path)))


def _loaded(path: str, *, dtype: str = "auto", device: str = "auto") -> "LoadedModel":
    from quire.models.loader import load_model

    return load_model(path, dtype=dtype, device=device, verify=True)


def _described(model: "LoadedModel") -> str:
    """Size and implementation of a model that was compared with Transformers."""
    assert model.implementation is not None, "load_model sets it"
    return (
        f"{format_size(model.weight_bytes)} of weights, logits equal to Transformers; "
        f"implementation: {model.implementation.text}"
    )


def _offloaded(budget_bytes: int) -> str:
    """Load the packaged model with half of its weights offloaded, on the default device."""
    from quire.models.loader import load_model
    from quire.offload.weights.placement import place_beyond

    half = load_model("quire-tiny", dtype="float32", placer=place_beyond(budget_bytes))
    assert half.place is not None, "the run has a placement function"
    text = half.place.text.removeprefix("weights: ")
    return f"{text}, logits equal to Transformers"


def _tried(name: str, action: Callable[[], str]) -> Finding:
    try:
        return Finding(name, action())
    except _FAILURES as error:
        return Finding(name, f"{type(error).__name__}: {error}", ok=False)


def _test_request(model: "LoadedModel") -> str:
    """Run a retrieval prompt; compare with Transformers and check that all pages are freed."""
    from quire.api.llm import LLM
    from quire.cli.exactness import compare_with_generate
    from quire.config.kv_config import KVConfig
    from quire.config.sampling_params import SamplingParams
    from quire.evals.questions import DOCUMENT_START
    from quire.evals.tasks import make
    from quire.evals.tasks.words import haystack

    llm = LLM(model, kv=KVConfig(memory="8MiB"))

    def measure(text: str) -> int:
        return len(llm.encode(text))

    task = make("kv", 0, _TEST_TOKENS, filler=haystack(), measure=measure)
    params = SamplingParams(max_tokens=measure(task.queries[0].answer), temperature=0.0)
    (output,) = llm.generate(DOCUMENT_START + task.prompt(), params)
    llm.engine.check()
    if not compare_with_generate(model.name, [output]).passed:
        raise InvariantError(
            f"output {output.text!r} of the test request differs from Transformers"
        )
    usage = output.usage
    return (
        f"output {output.text!r} equal to Transformers: {usage.prompt_tokens} prompt tokens, "
        f"{1000 * usage.total_s:,.0f} ms, {format_size(usage.kv_peak_bytes)} of KV; all pages freed"
    )


def _show_kernels(uses: "list[KernelUse]") -> None:
    """Print one row for each kernel and reason of an operation."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    storages: dict[tuple[str, str, str], list[str]] = {}
    for use in uses:
        storages.setdefault((use.operation, use.kernel, use.reason), []).append(use.storage)
    table = Table(box=None, title="Kernels on this processor", title_justify="left")
    for column in ("operation", "stored as", "kernel", "reason"):
        table.add_column(column, overflow="fold")
    for (operation, kernel, reason), names in storages.items():
        table.add_row(operation, ", ".join(names), escape(kernel), escape(reason))
    Console().print(table)


def _show(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(show_header=False, box=None)
    for finding in findings:
        mark = f"[green]{finding.mark}[/]" if finding.ok else "[bold red]FAIL[/]"
        table.add_row(mark, finding.name, escape(finding.value))
    Console().print(table)


_HEAD_DIM, _LIKELY_SCRATCH_BYTES = 64, 1 << 20
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
    """The kernel of one operation."""

    operation: str  # such as `linear layers`
    storage: str  # type or codec of the weights or the KV; "" if it does not matter
    kernel: str  # "none" if the operation is not possible
    reason: str  # why this kernel is selected, or why a faster one is not

    @property
    def text(self) -> str:
        return f"{self.kernel} ({self.reason})"


def kernel_uses() -> Iterator[KernelUse]:
    """Yield the kernel of each operation on a CPU."""
    from quire.kernels.native.library import load_library

    library = load_library()
    missing = why_missing(library)
    for storage in ("float32", "bfloat16", "float16", "int8", "int4"):
        yield _linear(library, storage, missing)
    if missing is None:
        yield _use("RMSNorm and RoPE", "", "C extension", "in the native decoder")
    else:
        yield _use("RMSNorm and RoPE", "", "modules of Transformers", missing)
    yield from _attention_kernels()
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
    from quire.kernels.native.arguments import AVX2, AVX512_BF16

    if storage == "float32":
        return "float32 products"
    if storage == "float16":
        return "stored as float32, float32 products"
    if storage == "bfloat16":
        if library.path == AVX512_BF16:
            return "bfloat16 products"
        lack = "slow" if library.best_path == AVX512_BF16 else "no"
        return f"{lack} bfloat16 products: widened to float32 in registers"
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


def _attention_kernels() -> Iterator[KernelUse]:
    """Attention of decode steps by the type or codec of the KV."""
    import torch

    from quire.errors import QuireError
    from quire.kernels.select import select_backend
    from quire.layout.codec_names import CODECS

    operation, cpu = "attention, decode", torch.device("cpu")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        choice = select_backend(
            "auto", cpu, dtype=dtype, head_dim=_HEAD_DIM, scratch_bytes=_LIKELY_SCRATCH_BYTES
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
                scratch_bytes=_LIKELY_SCRATCH_BYTES,
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
    return text.removeprefix("C extension, ")


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


_PROMPT_TOKENS = 40
_NEW_TOKENS = 4


def generate_with_cache() -> str:
    """Generate with Transformers' own cache and with a QuireCache; compare the outputs."""
    import torch
    from transformers import AutoConfig

    from quire.hf import QuireCache
    from quire.models.source import find_model
    from quire.models.stored import read_headers
    from quire.models.weights import read_model
    from quire.models.wrapped import cache_argument

    folder, _ = find_model("quire-tiny")
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    model: Any = read_model(folder, config, read_headers(folder), dtype=torch.float32)
    prompt = torch.arange(2, 2 + _PROMPT_TOKENS)[None]
    inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
    expected = model.generate(**inputs, max_new_tokens=_NEW_TOKENS, do_sample=False)
    name = str(cache_argument(inspect.signature(model.forward).parameters))
    with QuireCache(model) as cache:
        found = model.generate(
            **inputs, max_new_tokens=_NEW_TOKENS, do_sample=False, **{name: cache}
        )
        used_bytes = cache.kv_used_bytes
    if not used_bytes:
        raise InvariantError("model.generate of Transformers did not use the QuireCache")
    if not torch.equal(found, expected):
        raise InvariantError(
            f"output {found[0].tolist()} of model.generate with a QuireCache differs from "
            f"{expected[0].tolist()} without it"
        )
    return f"model.generate(..., {name}=QuireCache(model)): output equal to Transformers"
