"""Cells of the roofline benchmark with round figures."""

from dataclasses import asdict, replace
from typing import Any

from benchmarks.roofline.measured import ENGINE, PARTS, SAMPLING, Cell, StepMeasure
from benchmarks.roofline.rates import Rates
from quire.plan.roofline import PartCost

RATES = Rates(read_bytes_per_s=100.0, flops_per_s={"float32": 1_000.0, "int8": 4_000.0})
MEASURE = StepMeasure(
    kind="decode",
    rows=32,
    tokens=32,
    steps=62,
    costs=(
        PartCost(name="mlp", weight_bytes=100, kv_bytes=0, flops=16_000),
        PartCost(name="attention", weight_bytes=0, kv_bytes=300, flops=1_000),
    ),
    arithmetic={"mlp": "int8", "attention": "float32"},
    seconds={"mlp": 6.0, "attention": 3.0, SAMPLING: 0.5, ENGINE: 0.5},
    over_floor=2.0,
)
CELL = Cell(
    model="125m",
    instruction_set="avx2",
    implementation="native",
    weight_codec="int8",
    kv_codec="none",
    weight_bytes=400,
    rates=RATES,
    steps=(MEASURE,),
)
PAGE_RATES = Rates(read_bytes_per_s=1e9, flops_per_s={"bfloat16": 1e12})


def cells() -> list[dict[str, Any]]:
    sizes = {"weight_bytes": 1_000_000, "kv_bytes": 0, "flops": 2_000_000_000}
    costs = tuple(PartCost(name=name, **sizes) for name in PARTS)
    arithmetic = dict.fromkeys(PARTS, "bfloat16")
    seconds = dict.fromkeys((*PARTS, SAMPLING, ENGINE), 0.01)
    measure = replace(MEASURE, costs=costs, arithmetic=arithmetic, seconds=seconds, over_floor=6.43)
    kinds = (("prefill", 4), ("decode", 1), ("decode", 4), ("decode", 32))
    steps = tuple(replace(measure, kind=kind, rows=rows) for kind, rows in kinds)
    first = replace(CELL, rates=PAGE_RATES, steps=steps)
    other = replace(first, instruction_set="avx512_bf16", weight_codec="auto", steps=steps[:2])
    return [asdict(other), asdict(first)]


def run_object() -> dict[str, Any]:
    return {
        "name": "bench roofline",
        "claims": {"decode_step_over_floor": 1.5},
        "arms": {"cells": cells(), "refused": []},
        "config": {"model": "125m", "prompt_tokens": 512, "threads": 2, "rounds": 5},
        "hardware": {"cpu": "a <processor>"},
        "versions": {"torch": "2.13.0", "transformers": "5.23.0", "quire": "0.1.0"},
        "commit": "abc",
    }
