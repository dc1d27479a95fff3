"""What commands end with under `--json`, and the records that they write; results of benchmarks."""

import json
from pathlib import Path

from benchmarks.__main__ import app as benchmarks
from benchmarks.common.result import Chart, PartResult, Table
from golden.cases import case, stored
from golden.workshop import ENGINE_OPTIONS, Workshop
from quire.plan.ceilings import Ceilings, write_ceilings
from quire.plan.machine import this_machine
from quire.plan.rates import DecodeRates, PrefillRates, StepRates, model_key, steps_key
from support.model_specs import PUBLIC_SHAPES

SMALL = (*ENGINE_OPTIONS, "--kv-memory=2MiB")
PROMPT = "<|doc|>Once upon a time"
CHAT = [{"role": "user", "content": "Hello"}]


def _openai_line(custom_id: str, url: str, **body: object) -> dict[str, object]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


EVICTING = {"evict": "recent:cap=16,every=8", "record_evictions": True, "ignore_eos": True}
BATCH_LINES: dict[str, object] = {
    "plain": {"id": "a", "prompt": PROMPT, "max_tokens": 3},
    "plain_several": {"prompt": PROMPT, "max_tokens": 2, "n": 2, "temperature": 1.0, "seed": 3},
    "plain_chat": {"id": 7, "messages": CHAT, "max_tokens": 2},
    "plain_evicting": {"prompt": PROMPT * 8, "max_tokens": 8, **EVICTING},
    "completion": _openai_line("b", "/v1/completions", prompt=PROMPT, max_tokens=3),
    "chat": _openai_line("c", "/v1/chat/completions", messages=CHAT, max_tokens=3),
    "plain_error": {"prompt": PROMPT, "max_tokenss": 3},
    "plain_never_fits": {"prompt": [5] * 4000},
    "completion_error": _openai_line("d", "/v1/completions", prompt=PROMPT, max_tokens=-1),
    "not_json": None,
}


def batch_input(path: Path, names: tuple[str, ...] = tuple(BATCH_LINES)) -> Path:
    lines = [BATCH_LINES[name] for name in names]
    texts = ["{prompt" if line is None else json.dumps(line) for line in lines]
    path.write_text("".join(text + "\n" for text in texts), encoding="utf-8")
    return path


@case()
def generate(workshop: Workshop) -> object:
    options = ("--max-tokens=4", "--temperature=0", *SMALL)
    several = ("--n=2", "--use-beam-search", "--beam-width=2", "--max-tokens=2", *SMALL)
    one = workshop.run("generate", "quire-tiny", PROMPT, *options, "--kv-events=events.jsonl")
    beams = workshop.run("generate", "-p", PROMPT, *several)
    events = (workshop.folder / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return one | {"beams": {"choices": beams["choices"]}, "events": list(map(json.loads, events))}


@case(loose=("state.seed",))
def batch(workshop: Workshop) -> object:
    source = batch_input(workshop.folder / "in.jsonl")
    allow = ("--evict-allow=all", "--temperature=0")
    last = workshop.run("batch", "quire-tiny", source, "out.jsonl", *allow, *SMALL, exit_code=1)
    text = (workshop.folder / "out.jsonl").read_text(encoding="utf-8")
    records = {record["line"]: record for record in map(json.loads, text.splitlines())}
    named = {name: records[number] for number, name in enumerate(BATCH_LINES, start=1)}
    state = json.loads((workshop.folder / "out.jsonl.state").read_text(encoding="utf-8"))
    return {"last_line": last, "records": named, "state": state}


@case()
def plan(workshop: Workshop) -> object:
    sizes = ("--memory=2GiB", "--weights-memory=8MiB", "--kv-memory=64MiB")
    return workshop.run("plan", *sizes, "--workload=1024,256,16", "--disk-kv-memory=1GiB")


@case()
def plan_of_kinds(workshop: Workshop) -> object:
    """Bytes of models whose layers have windows, chunks, unequal heads, latents, others' KV."""
    found = {}
    sizes = {"deepseek-v3": ("--kv-memory=80GiB", "--sequence-tokens=32768")}
    for name, config in PUBLIC_SHAPES.items():
        folder = workshop.folder_for(name)
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        for codec in ("bfloat16", "int8"):
            options = (f"--kv-codec={codec}", *sizes.get(name, ()))
            result = workshop.run("plan", folder, "--memory=2TiB", *options)
            found[f"{name}, {codec}"] = {
                "claims": result["claims"],
                "kinds": result["arms"]["kinds"],
            }
    return found


@case()
def plan_maximize_batch(workshop: Workshop) -> object:
    _store_rates(workshop)
    requested = ("--maximize-batch=256,64", "--cap=64", "--every=8", "--memory=1GiB")
    return workshop.run("plan", *requested, "--kv-memory=16MiB")


def _store_rates(workshop: Workshop) -> None:
    """Rates of this machine's steps, where the command looks for them."""
    key = model_key(workshop.model.spec, dtype="bfloat16", device="cpu")
    decode = DecodeRates(batch_s=((1, 0.01), (8, 0.02)), slot_s=1e-7, evict_row_s=1e-4)
    rates = StepRates(
        whole=PrefillRates(token_s=1e-4), blocks=PrefillRates(token_s=2e-4), decode=decode
    )
    ceilings = Ceilings(
        machine=this_machine(1),
        read_bytes_per_s=1e10,
        copy_bytes_per_s=1e10,
        products=(),
        steps={steps_key(key, rule): rates for rule in ("full", "recent", "average")},
    )
    write_ceilings(ceilings, workshop.folder / "cache" / "quire" / "ceilings.json")


@case()
def simulate(workshop: Workshop) -> object:
    trace = workshop.folder / "trace.jsonl"
    line = '{{"timestamp": {}, "input_length": 600, "output_length": 30, "hash_ids": [1, {}]}}\n'
    trace.write_text("".join(line.format(2 * i, i // 2 + 2) for i in range(8)), encoding="utf-8")
    sizes = ("--kv-memory=4MiB", "--swap-space=8MiB", "--preempt=swap", "--tenants=a; b")
    tenants = "--trace-tenants=round_robin:a,b"
    return workshop.run("simulate", "quire-tiny", "--trace", trace, *sizes, tenants)


@case(maps=("arms.ceilings.copies"))
def profile(workshop: Workshop) -> object:
    found = workshop.run("profile", "--quick", "--threads=1", f"--output={workshop.folder}/c.json")
    of_machine = ("swap_out_", "swap_in_")
    claims = {k: v for k, v in found["claims"].items() if not k.startswith(of_machine)}
    return found | {"claims": claims}


@case()
def calibrate(workshop: Workshop) -> object:
    return workshop.run(
        *("calibrate", "quire-tiny", "--tokens=64", "--threads=1"),
        *("--output", workshop.folder_for("calibrated")),
    )


@case(loose=("arms.findings.ok", "arms.kernels*", "claims.healthy"))
def doctor(workshop: Workshop) -> object:
    return workshop.run("doctor")


@case(loose=("claims.exactness_*",))
def demo(workshop: Workshop) -> object:
    return workshop.run("demo", "quire-tiny", "--max-tokens=2", "--kv-memory=24MiB")


@case()
def bench_throughput(workshop: Workshop) -> object:
    sizes = ("--num-prompts=2", "--input-len=8", "--output-len=4", "--num-iters=1")
    return workshop.run("bench", "throughput", *sizes, "--num-iters-warmup=0", *SMALL)


@case()
def bench_latency(workshop: Workshop) -> object:
    sizes = ("--batch-size=2", "--input-len=8", "--output-len=4", "--num-iters=1")
    return workshop.run("bench", "latency", *sizes, "--num-iters-warmup=0", *SMALL)


@case(exact=("policies.*.options.*", "budgets.*.options.*"))
def policies(workshop: Workshop) -> object:
    found = workshop.run("policies")
    return {name: _by_name(rows) for name, rows in found.items() if name != "name"}


@case(exact=("*.options", "*bits", "*bytes"))
def codecs(workshop: Workshop) -> object:
    return _by_name(workshop.run("codecs")["codecs"])


def _by_name(rows: list[dict[str, object]]) -> dict[object, object]:
    return {row["name"]: row for row in rows}


@case(loose=("claims.*", "arms.full.by_depth*", "arms.configured.by_depth*", "arms.verdicts.*"))
def eval_run(workshop: Workshop) -> object:
    from quire.evals.suite import sanity

    before, passed = sanity.check, sanity.Sanity(status=sanity.PASSED)
    sanity.check = lambda *args, **options: passed
    sizes = ("--tokens=64", "--num-prompts=2", "--evict=recent:cap=25%,every=8", *SMALL)
    try:
        return workshop.run("eval", "--tasks=lines,perplexity", *sizes)
    finally:
        sanity.check = before


@case()
def eval_fidelity(workshop: Workshop) -> object:
    path = workshop.folder / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": PROMPT}) + "\n", encoding="utf-8")
    sizes = ("--max-tokens=3", "--kv-codec=int2", *SMALL)
    return workshop.run("eval", "fidelity", "quire-tiny", "--data", path, *sizes)


@case(exact=("*.metrics", "*.suites"))
def eval_tasks(workshop: Workshop) -> object:
    return _by_name(workshop.run("eval", "tasks")["tasks"])


# ---- benchmarks ----------------------------------------------------------------------------------


@case()
def benchmark_invariant(workshop: Workshop) -> object:
    return workshop.run("invariant", "--quick", "--threads=1", of=benchmarks)


_RESULT = PartResult(
    claims={"a": 1.5},
    tables=(Table(name="t", caption="c", columns=("x", "y"), rows=(("a", 1), ("b", None))),),
    charts=(
        Chart(name="c", title="T", x_label="x", y_label="y", lines={"a": ((1, 2.5),)}, log_y=True),
    ),
    raw={"repeats": [1, 2]},
    seconds=2.5,
)


def _describe_result(folder: Path) -> object:
    return json.loads((folder / "part.json").read_text(encoding="utf-8"))


def _read_result(workshop: Workshop, folder: Path) -> object:
    found = PartResult.from_json(_describe_result(folder))
    assert found == _RESULT
    return {"charts": [chart.name for chart in found.charts]}


@stored(_describe_result, _read_result, exact=("*",))
def benchmark_part(workshop: Workshop, folder: Path) -> None:
    """A part with everything that may be in it."""
    (folder / "part.json").write_text(json.dumps(_RESULT.to_json(), indent=1), encoding="utf-8")
