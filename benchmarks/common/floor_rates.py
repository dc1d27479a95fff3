"""Rates of steps by arithmetic alone: what no engine on a machine can be faster than.

    reading    2 FLOP for each weight and token, and attention's two products, over the rate of
               products [FLOP/s]
    decoding   bytes of the weights, once, and of the KV over the rate of reading memory [B/s]

Nothing else takes time: no overhead of a step, no evicting.
"""

from quire.layout.model import ModelSpec
from quire.plan.preemption_costs import assumed_prefill
from quire.plan.rates import DecodeRates, StepRates
from quire.plan.roofline import weights_read_bytes


def floor_rates(
    model: ModelSpec,
    *,
    read_bytes_per_s: int | float,
    flops_per_s: int | float,
    block_flops_per_s: int | float | None = None,
    rows: int = 1,
    bytes_per_value: int | float = 2,
) -> StepRates:
    """Rates of a step at a machine's ceilings.

    Args:
        model: the shape.
        read_bytes_per_s: of memory.
        flops_per_s: of products of a whole prompt.
        block_flops_per_s: of products of as many rows as a block has tokens; None: the same.
        rows: of the batch, by which a mixture of experts reads more or fewer of them.
        bytes_per_value: of weights and KV.
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
