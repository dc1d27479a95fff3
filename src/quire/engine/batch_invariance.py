"""`--batch-invariant`: outputs that do not depend on the other requests of the batch.

step          runs as forward passes of `INVARIANT_ROWS` rows each, the last one padded: matrix
              products, norms and activations have the same shape for every batch. Products of
              packed weights, also int8 and int4, sum each row in the same order for any number
              of rows
attention     computed for each token separately over its pages, in prefill and in decode. Latents
              are not expanded, and an index selects for each token separately
states        of recurrent layers are updated token by token, in prefill as in decode
sampling      one row at a time

The logits of a token then depend only on the tokens before it. Other requests, chunk sizes and
preemptions do not change a bit of them. Attention statistics are summed chunk by chunk, so the last
bits of such a sum depend on the chunk sizes: eviction rules that need one are refused.
"""

from collections.abc import Callable

from quire.config.kv_config import KVConfig
from quire.kernels.backend import AttentionBackend
from quire.kernels.native.backend import NativeAttention
from quire.kernels.select import BackendChoice
from quire.layout import limits
from quire.layout.eviction import PRESSURE
from quire.layout.kv_format import read_format
from quire.layout.model import ModelSpec
from quire.layout.statistics import AttentionMax, QueryRing, Statistic
from quire.models.base import FixedShapes
from quire.models.loader import LoadedModel
from quire.policies.eviction import EvictionRule
from quire.scheduler.schedule_config import INVARIANT_ROWS

OPTION = "--batch-invariant"
_EXACT = (QueryRing, AttentionMax)  # copies and maxima, without sums


def prepare_batch_invariant(model: LoadedModel, config: KVConfig, codec: str) -> None:
    """Refuse options whose outputs depend on the batch, and prepare the model for fixed shapes."""
    form = read_format(codec)
    if model.decoder.device.type != "cpu":
        raise limits.refused(limits.INVARIANT_DEVICE, device=model.decoder.device)
    if model.spec.mixture is not None:
        raise limits.refused(limits.INVARIANT_MIXTURE)
    if config.offload.kv_memory:
        raise limits.refused(limits.INVARIANT_OFFLOAD)
    if form.needs_plain or form.promoted is not None:
        raise limits.refused(limits.INVARIANT_WINDOW, codec=config.codec)
    if config.attention not in ("auto", "native"):
        raise limits.refused(limits.INVARIANT_BACKEND, attention=config.attention)
    if not isinstance(model.decoder, FixedShapes):
        why = f"{type(model.decoder).__name__} has no forward pass of a fixed number of rows"
        raise limits.refused(limits.INVARIANT_MODEL, why=why)
    why_not = model.decoder.prepare_fixed_shapes(INVARIANT_ROWS)
    if why_not is not None:
        raise limits.refused(limits.INVARIANT_MODEL, why=why_not)


def one_by_one(choice: BackendChoice, spec: ModelSpec) -> AttentionBackend:
    """Attention for each token separately."""
    if not isinstance(choice.backend, NativeAttention):
        why = f"needs native attention, got {choice.backend.name} ({choice.reason})"
        raise limits.refused(limits.INVARIANT_MODEL, why=why)
    for heads, layer in zip(spec.heads, spec.layers, strict=True):
        if heads.latent is not None and layer.stores:
            dims, group = (heads.key_dim, heads.value_dim), heads.query_heads // heads.kv_heads
            why_not = choice.backend.why_not_joined(dims, group)
            if why_not is not None:
                raise limits.refused(limits.INVARIANT_MODEL, why=why_not)
    return choice.backend.one_by_one(INVARIANT_ROWS)


def exact_statistics(
    why_not: Callable[[Statistic], str | None],
) -> Callable[[Statistic], str | None]:
    """Extend `why_not`: also refuse statistics that are summed chunk by chunk."""

    def reason(statistic: Statistic) -> str | None:
        if isinstance(statistic, _EXACT):
            return why_not(statistic)
        return (
            f"{OPTION} refuses rules that sum a statistic over tokens ({statistic.name}): the "
            "last bits of the sum depend on the chunks of the prompt; use a rule on positions, "
            "keys or a window of queries, such as sinks, keydiff or snapkv"
        )

    return reason


def refuse_pressure(rule: EvictionRule) -> None:
    """Refuse a rule that evicts only when the KV memory is full (`when=pressure`)."""
    if rule.evicts and rule.when == PRESSURE:
        raise limits.refused(limits.INVARIANT_PRESSURE)
