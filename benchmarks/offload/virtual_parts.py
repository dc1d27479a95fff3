"""Parts on the virtual clock at full size: latency, throughput with weights, codes, positions."""

from dataclasses import replace

from benchmarks.common.result import Cell, Chart, Numbers, PartResult, Table
from benchmarks.offload.config import OffloadBenchConfig
from benchmarks.offload.virtual import BY_NAME, MACHINES, Load, case_of, one_by_one

_ARMS = tuple(BY_NAME[name] for name in ("prefetch", "lA", "lB"))
_ROWS = 64  # rows of the paper's latency runs
_INT4 = 0.5625  # bytes of an element, in groups of 64 with a scale and a zero of 16 bits


def run_latency(config: OffloadBenchConfig) -> PartResult:
    """Weights on the device, 64 rows: the paper's Tables 3 and 4, by data sheets."""
    rows: list[tuple[Cell, ...]] = []
    for machine in MACHINES:
        for model in ("OPT-6.7B", "OPT-13B", "Llama-3-8B"):
            case = case_of(model, machine, layers=config.layers)
            for prompt in config.prompts:
                for generated in config.generated:
                    load = Load(rows=_ROWS, prompt=prompt, generated=generated)
                    found = [case.tokens_per_s(arm, load) for arm in _ARMS]
                    gain = found[2] / found[0]
                    rows.append((machine, model, prompt, generated, *found, gain))
    gains = {row[:4]: float(row[-1] or 0) for row in rows}
    first = (config.prompts[-1], config.generated[0])
    return PartResult(
        claims={
            "a100_6_7b_gain": gains["a100", "OPT-6.7B", *first],
            "a100_13b_gain": gains["a100", "OPT-13B", *first],
            "h200_6_7b_gain": gains["h200", "OPT-6.7B", *first],
            "h200_llama_3_8b_gain": gains["h200", "Llama-3-8B", *first],
        },
        tables=(
            Table(
                name="offload-latency",
                caption=(
                    f"Tokens/s of {_ROWS} rows, weights on the device and all KV in host memory, "
                    "by data sheets, on the virtual clock."
                ),
                columns=(
                    "machine",
                    "model",
                    "prompt",
                    "generated",
                    "prefetch only",
                    "paper's split",
                    "pipelined",
                    "gain",
                ),
                rows=tuple(rows),
            ),
        ),
    )


def run_weights(config: OffloadBenchConfig) -> PartResult:
    """Offloaded weights: columns of 8 batches, single batches, and the order on the link."""
    return PartResult(
        claims=_hiding_claims(config),
        tables=(_columns(config), _batch_sizes(config), _hiding(config)),
    )


def _columns(config: OffloadBenchConfig) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for model in ("OPT-6.7B", "OPT-13B", "OPT-30B"):
        case = case_of(model, "a100", layers=config.layers, weights_on_device=False)
        for prompt in config.prompts:
            load = Load(rows=32, prompt=prompt, generated=config.generated[0])
            by_row = case.tokens_per_s(BY_NAME["lB"], load)
            found = [case.tokens_per_s(arm, replace(load, batches=8)) for arm in _ARMS]
            rows.append((model, prompt, by_row, *found, found[2] / found[0]))
    return Table(
        name="offload-columns",
        caption=(
            "Weights and KV in host memory, A100: tokens/s of one batch of 32 rows, and of 8 such "
            f"batches that share each layer; {config.generated[0]} tokens each."
        ),
        columns=(
            "model",
            "prompt",
            "row, pipelined",
            "column, prefetch",
            "column, paper's split",
            "column, pipelined",
            "gain",
        ),
        rows=tuple(rows),
    )


def _batch_sizes(config: OffloadBenchConfig) -> Table:
    rows: list[tuple[Cell, ...]] = []
    case = case_of("OPT-6.7B", "a100", layers=config.layers, weights_on_device=False)
    for size in config.batches:
        load = Load(rows=size, prompt=1024, generated=32, batches=8)
        found = [case.tokens_per_s(arm, load) for arm in _ARMS]
        rows.append((size, *found, found[2] / found[0]))
    return Table(
        name="offload-batches",
        caption="The same by rows of a batch: OPT-6.7B, prompts of 1,024, 32 tokens each.",
        columns=("rows", "prefetch only", "paper's split", "pipelined", "gain"),
        rows=tuple(rows),
    )


def _hiding_rates(config: OffloadBenchConfig, size: int) -> tuple[float, float, float]:
    """Tokens/s of a small batch: no recompute, recompute after all weights, or after W_K and W_V.

    Layers run one at a time, as in the paper: nothing of the next layer is prefetched.

    """
    case = case_of("OPT-6.7B", "a100", layers=config.layers, weights_on_device=False)
    load = Load(rows=size, prompt=256, generated=64)
    variants = (("prefetch", False), ("lA", False), ("lA", True))
    plain, coarse, fine = (
        case.tokens_per_s(one_by_one(BY_NAME[name], fine=fine), load) for name, fine in variants
    )
    return plain, coarse, fine


def _hiding(config: OffloadBenchConfig) -> Table:
    rows = tuple((size, *_hiding_rates(config, size)) for size in config.batches)
    return Table(
        name="offload-hiding",
        caption=(
            "The paper's Table 2: tokens/s at small batches with weights on the link, layers one "
            "by one, OPT-6.7B on an A100, 256 + 64 tokens."
        ),
        columns=("rows", "no recompute", "after all weights", "after W_K and W_V"),
        rows=rows,
    )


def _hiding_claims(config: OffloadBenchConfig) -> Numbers:
    rates = [_hiding_rates(config, size) for size in config.batches]
    return {
        "hiding_never_slower": int(all(fine >= coarse for _, coarse, fine in rates)),
        "hiding_over_flexgen": min(fine / plain for plain, _, fine in rates),
    }


def run_codec(config: OffloadBenchConfig) -> PartResult:
    """4-bit KV on the link, with X in 16 or in 4 bits (the paper's Figure 9)."""
    widths = (("16 + 16", 2, 2), ("4 + 16", _INT4, 2), ("4 + 4", _INT4, _INT4))
    rows: list[tuple[Cell, ...]] = []
    gains: Numbers = {}
    for label, kv, x in widths:
        case = case_of("OPT-13B", "a100", layers=config.layers, kv_value_bytes=kv, x_value_bytes=x)
        load = Load(rows=32, prompt=config.prompts[-1], generated=config.generated[0])
        found = [case.tokens_per_s(arm, load) for arm in _ARMS]
        batch = case.layout(BY_NAME["lB"], 32, 32 * 1024).batch
        rows.append((label, x / kv / 2, batch.x / (32 * 1024), *found, found[2] / found[0]))
        gains[f"codec_gain_{label.replace(' + ', '_')}"] = found[2] / found[0]
    return PartResult(
        claims=gains,
        tables=(
            Table(
                name="offload-codec",
                caption="Bits of KV + of X on the link: OPT-13B on an A100, 32 rows, tokens/s.",
                columns=(
                    "bits",
                    "xi",
                    "recomputed fraction",
                    "prefetch only",
                    "paper's split",
                    "pipelined",
                    "gain",
                ),
                rows=tuple(rows),
            ),
        ),
    )


def run_position(config: OffloadBenchConfig) -> PartResult:
    """Splits over a generation: prompts of 128, 32 tokens, 64 rows (the paper's Figure 12)."""
    case = case_of("OPT-6.7B", "a100")
    lines = {}
    for arm in _ARMS[1:]:
        lines[arm.label] = tuple(
            (length, case.layout(arm, _ROWS, _ROWS * length).batch.x / _ROWS)
            for length in range(128, 161, 4)
        )
    rows = tuple(
        (length, paper, pipelined)
        for (length, paper), (_, pipelined) in zip(*lines.values(), strict=True)
    )
    return PartResult(
        claims={"paper_split_at_128": rows[0][1], "paper_split_at_160": rows[-1][1]},
        tables=(
            Table(
                name="offload-position",
                caption="Recomputed tokens of a row, OPT-6.7B on an A100, 64 rows.",
                columns=("position", "paper's split", "pipelined"),
                rows=rows,
            ),
        ),
        charts=(
            Chart(
                name="offload-position",
                title="Splits over a generation",
                x_label="tokens of a row",
                y_label="recomputed",
                lines=lines,
            ),
        ),
    )
