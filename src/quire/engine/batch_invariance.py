"""Outputs that do not depend on the rest of the batch: what `--batch-invariant` needs and refuses.

step          runs as forwards of `INVARIANT_ROWS` rows each, the last one padded: products, norms
              and activations have one shape whatever else is in the batch
attention     one walk over the pages for each token, in a prompt as in an answer
sampling      one row at a time

The logits of a token then depend on the tokens before it alone: companions, chunk sizes and
preemptions do not change a bit. A sum over the tokens of a request, such as an attention statistic,
is added up chunk by chunk, so its last bits depend on the chunks: rules that need one are refused.
"""

from collections.abc import Callable
from typing import NoReturn

from quire.config.kv_config import KVConfig
from quire.errors import UnsoundCombination
from quire.kernels.backend import AttentionBackend
from quire.kernels.native.backend import NativeAttention
from quire.kernels.select import BackendChoice
from quire.layout.eviction import PRESSURE
from quire.layout.kv_format import read_format
from quire.layout.statistics import QueryRing, SignatureBits, SignedUntil, Statistic
from quire.models.base import FixedShapes
from quire.models.loader import LoadedModel
from quire.policies.eviction import EvictionRule
from quire.scheduler.schedule_config import INVARIANT_ROWS

OPTION = "--batch-invariant"
_EXACT = (QueryRing, SignatureBits, SignedUntil)  # copies and bits: nothing is added up


def prepare_batch_invariant(model: LoadedModel, config: KVConfig, codec: str) -> None:
    """Refuse what depends on the batch, and make the model ready.

    Args:
        model: whose forwards get a fixed shape.
        config: the KV memory.
        codec: how keys and values are stored.

    Raises:
        UnsoundCombination: something else was asked for that depends on the batch; says why.
    """
    form = read_format(codec)
    if model.decoder.device.type != "cpu":
        _refuse(
            f"the kernels of {model.decoder.device} choose their order of sums by shape",
            "--device cpu",
        )
    if model.spec.mixture is not None:
        _refuse("a mixture of experts multiplies as many rows as the batch sends to an expert")
    if config.offload.kv_memory:
        _refuse("attention over KV offload is computed in parts", "no --kv-offload-memory")
    if form.needs_plain or form.promoted is not None:
        _refuse(f"the KV codec {config.codec} encodes tokens behind a window", "--kv-codec none")
    if config.attention not in ("auto", "native"):
        _refuse(
            f"--attention {config.attention} pads rows to their companions", "--attention native"
        )
    if not isinstance(model.decoder, FixedShapes):
        _refuse(f"{type(model.decoder).__name__} has no forwards of a fixed number of rows")
    why_not = model.decoder.prepare_fixed_shapes(INVARIANT_ROWS)
    if why_not is not None:
        _refuse(why_not)


def one_by_one(choice: BackendChoice) -> AttentionBackend:
    """The backend that attends for each token alone.

    Raises:
        UnsoundCombination: the chosen one cannot; with the reason why it was chosen.
    """
    if not isinstance(choice.backend, NativeAttention):
        _refuse(f"it needs native attention, got {choice.backend.name} ({choice.reason})")
    return choice.backend.one_by_one()


def exact_statistics(
    why_not: Callable[[Statistic], str | None],
) -> Callable[[Statistic], str | None]:
    """Beside what the model cannot give: statistics that are added up chunk by chunk."""

    def reason(statistic: Statistic) -> str | None:
        if isinstance(statistic, _EXACT):
            return why_not(statistic)
        return (
            f"{OPTION} takes no rule that adds up a statistic over tokens ({statistic.name}): the "
            "last bits of the sum depend on the chunks of the prompt; use a rule on positions, "
            "keys or a window of queries, such as sinks, keydiff or snapkv"
        )

    return reason


def refuse_pressure(rule: EvictionRule) -> None:
    """Refuse a schedule that evicts when the memory is full.

    Raises:
        UnsoundCombination: the other requests would decide when tokens leave.
    """
    if rule.evicts and rule.when == PRESSURE:
        _refuse("with when=pressure the other requests decide when tokens leave", "another when=")


def _refuse(why: str, instead: str = "") -> NoReturn:
    use = f"use {instead}, or leave out {OPTION}" if instead else f"leave out {OPTION}"
    raise UnsoundCombination(f"{OPTION}: {why}; {use}")
