"""`quire doctor`: shows versions, hardware and selected backends, and runs self-tests."""

import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import TYPE_CHECKING, Annotated

import typer

from quire.cli.common import AsJson
from quire.cli.completion import complete_model
from quire.cli.doctor_cache import generate_with_cache
from quire.cli.doctor_kernels import KernelUse, huge_pages, instruction_set, kernel_uses
from quire.cli.json_output import print_json
from quire.cli.report import envelope, hardware, versions
from quire.cli.startup import fast_imports, status
from quire.engine.host_memory import keep_freed_memory
from quire.errors import InvariantError, QuireError
from quire.layout.sizes import format_size

if TYPE_CHECKING:
    from quire.models.loader import LoadedModel

_CPU_FEATURES = (
    *("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16"),
    *("amx_tile", "amx_int8", "amx_bf16", "asimd", "sve"),
)
_SCRATCH_BYTES = 1 << 20
_FAILURES = (QuireError, OSError, RuntimeError, ImportError, TypeError, ValueError, AttributeError)
"""Errors that fail a check; the last three: an interface of a package that has changed."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        name: name of the check.
        value: what was found, or the error.
        ok: whether the check passed.
        mark: of a check that passed; `--`: an optional component is missing.
    """

    name: str
    value: str
    ok: bool = True
    mark: str = "ok"


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
    as_json: AsJson = False,
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
    if as_json:
        claims = {"healthy": int(healthy)}
        arms = {
            "findings": [asdict(finding) for finding in findings],
            "kernels": [asdict(use) for use in uses],
        }
        print_json(envelope("doctor", claims, arms, {}))
    if not healthy:
        raise typer.Exit(1)


def examine(model: str | None = None) -> Iterator[Finding]:
    """Run all checks, the cheap ones first.

    Args:
        model: folder or name of a model to load; None: only the packaged one.
    """
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

    found = hardware()
    yield Finding("system", platform.platform())
    yield Finding("processor", f"{found['cpu']}, {found['cores']} cores for this process")
    cpuinfo = Path("/proc/cpuinfo")
    features = cpu_features(cpuinfo.read_text(errors="replace")) if cpuinfo.is_file() else []
    yield Finding("instructions", ", ".join(features) or "unknown")
    text, runs = instruction_set()
    yield Finding("C extension", text, mark="ok" if runs else "--")
    yield Finding("huge pages", huge_pages())
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
            yield Finding(f"attention {name}", f"not available: {error}", ok=name != "auto")
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
    from quire.cli.demo_work import fact_prompt
    from quire.cli.exactness import compare_with_generate
    from quire.config.kv_config import KVConfig
    from quire.config.sampling_params import SamplingParams

    llm = LLM(model, kv=KVConfig(memory="8MiB"))
    prompt = fact_prompt(0, lambda text: len(llm.encode(text)))
    params = SamplingParams(max_tokens=prompt.max_tokens, temperature=0.0)
    (output,) = llm.generate(prompt.text, params)
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


def _show_kernels(uses: list[KernelUse]) -> None:
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
