"""`quire doctor`: what is here, what is used, and whether it works."""

import json
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import TYPE_CHECKING

import typer

from quire.cli.common import AsJson
from quire.cli.report import envelope, hardware, versions
from quire.engine.host_memory import keep_freed_memory
from quire.errors import InvariantError, QuireError
from quire.layout.sizes import format_size

if TYPE_CHECKING:
    from quire.models.loader import LoadedModel

_CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "asimd", "sve")
_SCRATCH_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: what.
        value: what was found, or what is wrong.
        ok: whether it is as it should be.
    """

    name: str
    value: str
    ok: bool = True


def doctor(
    *,
    as_json: AsJson = False,
) -> None:
    """Show versions, hardware and choices, and try the packaged model; exit code 1 on a fault."""
    findings = list(examine())
    _show(findings)
    healthy = all(finding.ok for finding in findings)
    if as_json:
        claims = {"healthy": int(healthy)}
        arms = {"findings": [asdict(finding) for finding in findings]}
        typer.echo(json.dumps(envelope("doctor", claims, arms, {})))
    if not healthy:
        raise typer.Exit(1)


def examine() -> Iterator[Finding]:
    """Look at everything, the cheap things first."""
    for name, version in versions().items():
        yield Finding(name, version or "not installed", ok=version is not None)
    yield from _machine()
    yield from _torch()
    yield from _attention()
    yield from _disk()
    yield from _model()


def cpu_features(cpuinfo: str) -> list[str]:
    """Instruction sets that matter here, from the text of /proc/cpuinfo."""
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
    memory = psutil.virtual_memory()
    yield Finding("memory", f"{format_size(memory.available)} free of {format_size(memory.total)}")
    yield Finding("freed memory", keep_freed_memory().explanation)


def _torch() -> Iterator[Finding]:
    import torch

    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        device = f"cuda: {properties.name}, {format_size(properties.total_memory)}"
    else:
        device = "cpu (torch sees no CUDA device)"
    yield Finding("device", device)
    yield Finding("threads", f"{torch.get_num_threads()}, --threads changes it")


def _attention() -> Iterator[Finding]:
    import torch

    from quire.kernels.select import BACKENDS, select_backend

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for name in ("auto", *BACKENDS):
        try:
            choice = select_backend(
                name, device, dtype=torch.float32, head_dim=64, scratch_bytes=_SCRATCH_BYTES
            )
        except QuireError as error:
            yield Finding(f"attention {name}", f"not here: {error}", ok=name != "auto")
        else:
            chosen = f"{choice.backend.name}: " if name == "auto" else ""
            yield Finding(f"attention {name}", f"{chosen}{choice.reason}")


def _disk() -> Iterator[Finding]:
    def keep() -> str:
        from quire.offload.tiers.disk import DiskTier

        with TemporaryDirectory() as folder:
            tier = DiskTier(Path(folder), _SCRATCH_BYTES)
            written, found = bytes(range(256)), bytearray(256)
            tier.write("trial", written)
            tier.read("trial", memoryview(found))
            tier.close()
        if bytes(found) != written:
            raise InvariantError("what a disk tier gave back is not what was written")
        how = "past the page cache" if tier.direct else "through the page cache"
        return f"prefixes can be kept on disk, {how} in {gettempdir()}"

    yield _tried("disk tier", keep)


def _model() -> Iterator[Finding]:
    loaded: list[LoadedModel] = []

    def load() -> str:
        from quire.models.loader import load_model

        model = load_model("quire-tiny", dtype="float32", device="cpu", verify=True)
        loaded.append(model)
        return f"{format_size(model.weight_bytes)} of weights, logits equal Transformers' own"

    yield _tried("packaged model", load)
    if loaded:
        yield _tried("weights brought", lambda: _brought(loaded[0].weight_bytes // 2))
        yield _tried("trial answer", lambda: _trial_answer(loaded[0]))


def _brought(budget_bytes: int) -> str:
    """Let the packaged model run with half of its weights brought, on the device there is."""
    from quire.models.loader import load_model
    from quire.offload.weights.placement import place_beyond

    half = load_model("quire-tiny", dtype="float32", placer=place_beyond(budget_bytes))
    assert half.place is not None, "a memory was given"
    text = half.place.text.removeprefix("weights: ")
    return f"{text}, logits equal Transformers' own"


def _tried(name: str, action: Callable[[], str]) -> Finding:
    try:
        return Finding(name, action())
    except (QuireError, OSError, RuntimeError, ImportError) as error:
        return Finding(name, f"{type(error).__name__}: {error}", ok=False)


def _trial_answer(model: "LoadedModel") -> str:
    """Let the packaged model look for a record in its context; compare, and count the pages."""
    from quire.api.llm import LLM
    from quire.cli.demo_work import fact_prompt
    from quire.cli.exactness import compare_with_generate
    from quire.config.kv_config import KVConfig
    from quire.config.sampling_params import SamplingParams

    llm = LLM(model, kv=KVConfig(memory="8MiB"))
    prompt = fact_prompt(0, lambda text: len(llm.encode(text)))
    params = SamplingParams(max_tokens=prompt.max_tokens, temperature=0.0)
    (answer,) = llm.generate(prompt.text, params)
    llm.engine.check()
    if not compare_with_generate(model.name, [answer]).passed:
        raise InvariantError(f"Transformers does not say {answer.text!r} to the trial prompt")
    usage = answer.usage
    return (
        f"the same as Transformers': {answer.text!r} after {usage.prompt_tokens} tokens, in "
        f"{usage.total_s:.2f} s and {format_size(usage.kv_peak_bytes)} of KV; every page is back"
    )


def _show(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(show_header=False, box=None)
    for finding in findings:
        mark = "[green]ok[/]" if finding.ok else "[bold red]FAULT[/]"
        table.add_row(mark, finding.name, escape(finding.value))
    Console().print(table)
