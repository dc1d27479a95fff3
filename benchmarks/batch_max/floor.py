"""The lower bound of the arms' times on this machine: products and memory reads alone.

The rates are measured in the same run: the read rate, and the product rate of prompts and of the
blocks between evictions. A prefill takes 2 FLOP per weight and token and the two products of
attention; a decode step reads the weights once, and the KV. Step overhead and eviction are left
out, so that the ratios are upper bounds for any engine on a machine.
"""

from dataclasses import dataclass

from benchmarks.batch_max.config import ED, FKV, BatchMaxConfig, bm_name
from benchmarks.common.models import SHAPES
from benchmarks.common.result import Numbers
from benchmarks.roofline.rates import RateProbe
from quire.layout.config import dtype_bytes
from quire.layout.model import ModelSpec
from quire.plan.batch_verdict import row_steps, run_seconds
from quire.plan.preemption_costs import assumed_prefill
from quire.plan.rates import DecodeRates, StepRates
from quire.plan.roofline import weights_read_bytes
from quire.policies.eviction import LaneShape, make_eviction

BUFFER_BYTES = 256 << 20
_LANES = LaneShape(num_layers=1, heads=1, page_tokens=1, page_bytes=1)  # caps are in tokens
_WIDTH = 2_048  # inner elements and columns of the measured products


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of this machine.

    Attributes:
        read_bytes_per_s: memory bandwidth.
        flops_per_s: product rate of a whole prompt.
        block_flops_per_s: product rate of one block of every row.
    """

    read_bytes_per_s: float
    flops_per_s: float
    block_flops_per_s: float


def measure_limits(config: BatchMaxConfig, block_rows: int) -> Limits:
    """Measure the limits.

    Args:
        config: its dtype is that of the products.
        block_rows: tokens of a step between evictions, over all rows of the batch.
    """
    found = []
    for rows in (min(config.prompt_tokens, 2_048), block_rows):
        probe = RateProbe((config.dtype,), BUFFER_BYTES, [(rows, _WIDTH, _WIDTH)])
        found.append(probe.measure())
    whole, block = found
    return Limits(
        read_bytes_per_s=max(rates.read_bytes_per_s for rates in found),
        flops_per_s=whole.flops_per_s[config.dtype],
        block_flops_per_s=block.flops_per_s[config.dtype],
    )


def floor_claims(config: BatchMaxConfig, limits: Limits, batches: dict[str, int]) -> Numbers:
    """Ratios of throughput at the limits, and the limits.

    Args:
        config: lengths and caps.
        limits: of the machine.
        batches: rows of each arm.
    """
    bm = bm_name(config.caps[0])
    rates = {name: _tokens_per_s(config, limits, name, batches[name]) for name in (FKV, ED, bm)}
    return {
        "floor_bm_over_fkv": rates[bm] / rates[FKV],
        "floor_bm_over_ed": rates[bm] / rates[ED],
        "floor_read_bytes_per_s": limits.read_bytes_per_s,
        "floor_flops_per_s": limits.flops_per_s,
        "floor_block_flops_per_s": limits.block_flops_per_s,
    }


def _tokens_per_s(config: BatchMaxConfig, limits: Limits, arm: str, rows: int) -> float:
    """Generated tokens per second of an arm at the limits, with prefill in the time."""
    spec = ModelSpec.from_config(SHAPES[config.model]().to_dict())
    rates = floor_rates(
        spec,
        read_bytes_per_s=limits.read_bytes_per_s,
        flops_per_s=limits.flops_per_s,
        block_flops_per_s=limits.block_flops_per_s,
        rows=rows,
        bytes_per_value=dtype_bytes(config.dtype),
    )
    [evict] = [found.evict for found in config.arms if found.name == arm]
    eviction = make_eviction(evict).for_request(config.prompt_tokens, _LANES).spec
    steps = row_steps(eviction, config.prompt_tokens, config.new_tokens)
    return run_seconds(rates, steps, rows).tokens_per_s


def floor_rates(
    model: ModelSpec,
    *,
    read_bytes_per_s: int | float,
    flops_per_s: int | float,
    block_flops_per_s: int | float | None = None,
    rows: int = 1,
    bytes_per_value: int | float = 2,
) -> StepRates:
    """Rates of a step at a machine's limits.

    Args:
        model: shape of the model.
        read_bytes_per_s: memory bandwidth.
        flops_per_s: compute rate of products over a whole prompt.
        block_flops_per_s: compute rate of products over one block of a prompt; None: `flops_per_s`.
        rows: batch size; decides which experts of a mixture are read.
        bytes_per_value: bytes of an element of weights and KV.
    """
    whole = assumed_prefill(model, flops_per_s)
    return StepRates(
        whole=whole,
        blocks=whole if block_flops_per_s is None else assumed_prefill(model, block_flops_per_s),
        decode=DecodeRates(
            batch_s=((rows, weights_read_bytes(model, rows, bytes_per_value) / read_bytes_per_s),),
            slot_s=model.kv_bytes_per_token(bytes_per_value) / read_bytes_per_s,
        ),
    )
