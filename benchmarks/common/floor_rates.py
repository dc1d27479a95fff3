"""Roofline rates of engine steps: upper bounds by arithmetic for any engine on a machine.

    prefill    2 FLOP per weight and token, and the two products of attention, at the machine's
                          FLOP/s
    decode     bytes of the weights, once, and of the KV, at the machine's memory bandwidth [B/s]

The rates include no step overhead and no eviction.
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
