"""Part `host`: gain of CPU attention if recompute does not pay, and with several devices."""

from dataclasses import replace

from benchmarks.common.result import Chart, PartResult, Table
from benchmarks.offload.arms import BY_NAME, step_work
from benchmarks.offload.arms_part import ratio, run_rounds
from benchmarks.offload.config import OffloadBenchConfig
from benchmarks.offload.simulated_machine import SimulatedMachine
from benchmarks.offload.virtual import case_of
from quire.offload.schedule.executor import VirtualClock
from quire.offload.schedule.planner import combine_devices, plan_step

_DEVICES = (1, 2, 4, 8)
_LAYERS = 8
# CPU attention waits for a layer's queries, so other layer time adds to the formula: keep it small
_OTHER, _HEADROOM = 0.01, 12.0


def run_host(config: OffloadBenchConfig) -> PartResult:
    """Run the part."""
    rows, gains, offs, errors = [], [], [], []
    for xi in [xi for xi in config.xis if xi >= 1]:
        for host in config.hosts:
            shape = replace(
                config.shape, x_ratio=xi, num_layers=min(_LAYERS, config.shape.num_layers)
            )
            machine = SimulatedMachine(
                shape, replace(config.ratios, host=host, other=_OTHER, headroom=_HEADROOM)
            )
            arms = [BY_NAME[name] for name in ("prefetch", "host_share", "all_host")]
            steps = run_rounds(machine, arms, config.repeats)
            gain = ratio(steps, "prefetch", "host_share")
            formula = 1 + 1 / host  # S / (1 / k + 1 / u) under S k
            offloaded = ratio(steps, "prefetch", "all_host")
            rows.append((xi, host, gain, formula, offloaded, steps["host_share"][-1].error))
            gains.append(gain)
            offs.append(abs(gain / formula - 1))
            errors += [step.error for step in steps["host_share"]]
    scaling = _devices(config)
    return PartResult(
        claims={
            "gain_host_attention": min(gains),
            "gain_host_attention_off_formula": max(offs),
            "host_merge_error": max(errors),
            "host_share_8_devices": _last(scaling, "all_host") / scaling["all_host"][0][1],
            "recompute_8_devices": _last(scaling, "lB") / scaling["lB"][0][1],
        },
        tables=(
            Table(
                name="offload-host",
                caption="If recompute does not pay: some tokens use CPU attention; threads.",
                columns=("xi", "u / k", "gain", "formula", "all CPU attention", "error"),
                rows=tuple(rows),
            ),
            _table(scaling),
        ),
        charts=(_chart(scaling),),
        raw={"gains": gains},
    )


Scaling = dict[str, tuple[tuple[int, float], ...]]


def _devices(config: OffloadBenchConfig) -> Scaling:
    """Tokens per second of all devices: OPT-6.7B, 32 rows of 1,024 tokens each, one host."""
    case = case_of("OPT-6.7B", "a100", layers=config.layers)
    found: Scaling = {}
    for name in ("all_host", "lB"):
        arm = BY_NAME[name]
        layout = case.layout(arm, 32, 32 * 1024)
        work = step_work(layout.batch, case.layers, case.sizes, case.speeds)
        schedule = plan_step(work, layout.rules)
        found[name] = tuple(
            (n, n * 32 / VirtualClock().run(combine_devices([schedule] * n)).seconds)
            for n in _DEVICES
        )
    return found


def _last(scaling: Scaling, name: str) -> float:
    return scaling[name][-1][1]


def _table(scaling: Scaling) -> Table:
    return Table(
        name="offload-devices",
        caption=(
            "Tokens/s of several A100 on one host, OPT-6.7B, 32 rows of 1,024 tokens each, on the "
            "virtual clock; each device has its own link, CPU attention shares the host."
        ),
        columns=("devices", "all CPU attention", "pipelined split"),
        rows=tuple(
            (n, offloaded, recomputed)
            for (n, offloaded), (_, recomputed) in zip(
                scaling["all_host"], scaling["lB"], strict=True
            )
        ),
    )


def _chart(scaling: Scaling) -> Chart:
    return Chart(
        name="offload-devices",
        title="Several devices on one host",
        x_label="devices",
        y_label="tokens/s",
        lines={BY_NAME[name].label: points for name, points in scaling.items()},
    )
