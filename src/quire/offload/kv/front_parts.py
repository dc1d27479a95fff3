"""Builds what an engine needs for fronts on the host: bytes of KV and of inputs, rates, carrier."""

from collections.abc import Sequence
from dataclasses import dataclass

from quire.kv.coded_layers import CodedLayers
from quire.kv.memory import KVMemory
from quire.kv.store import PageStore
from quire.offload.host_side import host_pool
from quire.offload.kv.front_choice import FrontChoice
from quire.offload.kv.front_rows import FrontRows
from quire.offload.kv.front_splits import FrontSplits
from quire.offload.kv.hosted import HostedFronts
from quire.offload.kv.hosting import Hosting
from quire.scheduler.request import Request


@dataclass(frozen=True, slots=True)
class FrontParts:
    """What belongs to fronts on the host.

    Attributes:
        fronts: of all sequences.
        hosting: for steps.
        splits: divides fronts; None where all of them is carried.
        why: what is made again or why nothing is, for people.
        offload_bytes: of offload memory, for KV and activations.
    """

    fronts: HostedFronts
    hosting: Hosting
    splits: FrontSplits | None
    why: str
    offload_bytes: int

    def totals(self) -> dict[str, int]:
        """Bytes on the host, tokens that were not carried so far: as `EngineStats` names them."""
        remaking, attention = self.hosting.remaking, self.hosting.attention
        return {
            "hosted_bytes": self.fronts.pool.used_bytes,
            "input_bytes": 0 if remaking is None else remaking.store.used_bytes,
            "made_again_tokens": 0 if remaking is None else remaking.num_made,
            "host_attended_tokens": 0 if attention is None else attention.num_attended,
        }

    def check(self) -> None:
        """Prove that every byte on the host is free or somebody's.

        Raises:
            InvariantError: one is not.
        """
        self.fronts.pool.check()
        if self.hosting.remaking is not None:
            self.hosting.remaking.store.book.check()


def build_fronts(
    choice: FrontChoice,
    memory: KVMemory,
    store: PageStore,
    coded: CodedLayers,
    stream_bytes: int,
    running: Sequence[Request],
) -> FrontParts:
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
    fronts = HostedFronts(memory, pool, store.page_positions)
    remaking = None
    if book is not None:
        remaking = choice.remaking(book, FrontRows(part, running))
    attention = choice.attention(memory, store, coded, fronts)
    splits = None
    if remaking is not None or attention is not None:
        splits = choice.splits(makes=remaking is not None, attends=attention is not None)
    choice.say_fallbacks(why, recomputes=remaking is not None, attends=attention is not None)
    hosting = Hosting(
        memory,
        fronts,
        choice.carrier(),
        splits=splits,
        remaking=remaking,
        remade=[group.name for group in choice.groups] if remaking is not None else (),
        attention=attention,
    )
    return FrontParts(fronts, hosting, splits, why, stream_bytes)
