"""Builds the parts of an engine's KV offload: host pool, activation store, splits, transfers."""

from collections.abc import Sequence
from dataclasses import dataclass

from quire.kv.coded_layers import CodedLayers
from quire.kv.memory import KVMemory
from quire.kv.store import PageStore
from quire.offload.host_side import host_pool
from quire.offload.kv.offload_choice import OffloadChoice
from quire.offload.kv.offloaded_prefixes import OffloadedPrefixes, OffloadedRowsOf
from quire.offload.kv.offloader import RowRequests
from quire.offload.kv.prefix_splits import PrefixSplits
from quire.offload.kv.step_offload import KVOffload
from quire.scheduler.request import Request


@dataclass(frozen=True, slots=True)
class KVOffloadComponents:
    """The parts of an engine's KV offload.

    Attributes:
        prefixes: offloaded prefixes of all sequences.
        kv_offload: creates the offload of each step.
        splits: divides offloaded prefixes; None if all KV is transferred.
        why: reason that KV is or is not recomputed, for messages.
        offload_bytes: size of offload memory, for KV and activations.
        offloaded_rows: offloaded pages and activations of sequences that are swapped.
    """

    prefixes: OffloadedPrefixes
    kv_offload: KVOffload
    splits: PrefixSplits | None
    why: str
    offload_bytes: int
    offloaded_rows: OffloadedRowsOf

    def totals(self) -> dict[str, int]:
        """Bytes offloaded and tokens not transferred so far, under the names of `EngineStats`."""
        kv_recompute, attention = self.kv_offload.kv_recompute, self.kv_offload.attention
        return {
            "offloaded_bytes": self.prefixes.pool.used_bytes,
            "activation_bytes": 0 if kv_recompute is None else kv_recompute.store.used_bytes,
            "recomputed_tokens": 0 if kv_recompute is None else kv_recompute.num_recomputed,
            "cpu_attended_tokens": 0 if attention is None else attention.num_attended,
        }

    def check(self) -> None:
        """Check that every byte of offload memory is free or has one owner.

        Raises:
            InvariantError: a byte has no owner or several.
        """
        self.prefixes.pool.check()
        if self.kv_offload.kv_recompute is not None:
            self.kv_offload.kv_recompute.store.allocator.check()


def build_kv_offload(
    choice: OffloadChoice,
    memory: KVMemory,
    store: PageStore,
    coded: CodedLayers,
    stream_bytes: int,
    running: Sequence[Request],
) -> KVOffloadComponents:
    """Divide offload memory over KV and activations, by measured rates or the user's fractions.

    Args:
        choice: which offloaded KV is recomputed or attended to on the CPU.
        memory: block tables and pools of the KV memory.
        store: bytes of the KV memory.
        coded: encodes and decodes pages.
        stream_bytes: size of offload memory.
        running: requests that hold KV; the scheduler's own list.
    """
    fraction, why = choice.fraction_and_reason()
    allocator = choice.memory.allocator(choice.memory.activation_bytes(fraction, stream_bytes))
    activation_bytes = (
        0
        if allocator is None
        else allocator.num_blocks * allocator.block_tokens * choice.memory.token_bytes
    )
    pool = host_pool(store, choice.layout, stream_bytes - activation_bytes)
    prefixes = OffloadedPrefixes(memory, pool, store.page_positions)
    kv_recompute = None
    if allocator is not None:
        kv_recompute = choice.kv_recompute(allocator, RowRequests(fraction, running))
    attention = choice.attention(memory, store, coded, prefixes)
    splits = None
    if kv_recompute is not None or attention is not None:
        splits = choice.splits(recomputes=kv_recompute is not None, attends=attention is not None)
    choice.log_fallbacks(why, recomputes=kv_recompute is not None, attends=attention is not None)
    kv_offload = KVOffload(
        memory,
        prefixes,
        choice.transfer_worker(),
        splits=splits,
        kv_recompute=kv_recompute,
        attention=attention,
        weights=choice.weights,
    )
    offloaded_rows = OffloadedRowsOf(prefixes, allocator)
    return KVOffloadComponents(prefixes, kv_offload, splits, why, stream_bytes, offloaded_rows)
