"""Builds what an engine needs for fronts on the host: bytes of KV and of inputs, rates, carrier."""

from collections.abc import Sequence
from dataclasses import dataclass

from quire.kv.coded_layers import CodedLayers
from quire.kv.memory import KVMemory
from quire.kv.store import PageStore
from quire.offload.host_side import host_pool
from quire.offload.kv.offload_choice import OffloadChoice
from quire.offload.kv.offloaded_prefixes import OffloadedPrefixes
from quire.offload.kv.prefix_splits import PrefixSplits
from quire.offload.kv.row_requests import RowRequests
from quire.offload.kv.step_offload import KVOffload
from quire.scheduler.request import Request


@dataclass(frozen=True, slots=True)
class KVOffloadComponents:
    """What belongs to fronts on the host.

    Attributes:
        prefixes: of all sequences.
        kv_offload: for steps.
        splits: divides fronts; None where all of them is carried.
        why: what is made again or why nothing is, for people.
        offload_bytes: of offload memory, for KV and activations.
    """

    prefixes: OffloadedPrefixes
    kv_offload: KVOffload
    splits: PrefixSplits | None
    why: str
    offload_bytes: int

    def totals(self) -> dict[str, int]:
        """Bytes on the host, tokens that were not carried so far: as `EngineStats` names them."""
        kv_recompute, attention = self.kv_offload.kv_recompute, self.kv_offload.attention
        return {
            "offloaded_bytes": self.prefixes.pool.used_bytes,
            "input_bytes": 0 if kv_recompute is None else kv_recompute.store.used_bytes,
            "recomputed_tokens": 0 if kv_recompute is None else kv_recompute.num_made,
            "cpu_attended_tokens": 0 if attention is None else attention.num_attended,
        }

    def check(self) -> None:
        """Prove that every byte on the host is free or somebody's.

        Raises:
            InvariantError: one is not.
        """
        self.prefixes.pool.check()
        if self.kv_offload.kv_recompute is not None:
            self.kv_offload.kv_recompute.store.book.check()


def build_kv_offload(
    choice: OffloadChoice,
    memory: KVMemory,
    store: PageStore,
    coded: CodedLayers,
    stream_bytes: int,
    running: Sequence[Request],
) -> KVOffloadComponents:
    """Divide the bytes for fronts over KV and inputs, as rates or the user say.

    Args:
        choice: what of them is not transferred as it is.
        memory: whose first pages they are.
        store: its bytes.
        coded: what encodes and decodes its pages.
        stream_bytes: of the host.
        running: requests that hold KV; the scheduler's own list.
    """
    part, why = choice.part_and_why()
    book = choice.book(choice.input_bytes(part, stream_bytes))
    input_bytes = 0 if book is None else book.num_blocks * book.block_tokens * choice.x_bytes
    pool = host_pool(store, choice.layout, stream_bytes - input_bytes)
    prefixes = OffloadedPrefixes(memory, pool, store.page_positions)
    kv_recompute = None
    if book is not None:
        kv_recompute = choice.kv_recompute(book, RowRequests(part, running))
    attention = choice.attention(memory, store, coded, prefixes)
    splits = None
    if kv_recompute is not None or attention is not None:
        splits = choice.splits(makes=kv_recompute is not None, attends=attention is not None)
    choice.say_fallbacks(why, recomputes=kv_recompute is not None, attends=attention is not None)
    kv_offload = KVOffload(
        memory,
        prefixes,
        choice.transfer_worker(),
        splits=splits,
        kv_recompute=kv_recompute,
        recomputed_share=[group.name for group in choice.groups]
        if kv_recompute is not None
        else (),
        attention=attention,
    )
    return KVOffloadComponents(prefixes, kv_offload, splits, why, stream_bytes)
