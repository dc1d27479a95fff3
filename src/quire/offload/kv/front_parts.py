"""Builds what an engine needs for fronts on the host: bytes of KV and of inputs, rates, carrier."""

from dataclasses import dataclass

from quire.kv.step import PagedKV
from quire.offload.host_side import host_pool
from quire.offload.kv.front_choice import FrontChoice
from quire.offload.kv.front_rows import FrontRows
from quire.offload.kv.front_splits import FrontSplits
from quire.offload.kv.hosted import HostedFronts
from quire.offload.kv.hosting import Hosting


@dataclass(frozen=True, slots=True)
class FrontParts:
    """What belongs to fronts on the host.

    Attributes:
        fronts: of all sequences.
        hosting: for steps.
        rows: who runs, as the scheduler says; None where nobody asks.
        splits: divides fronts; None where all of them is carried.
        why: what is made again or why nothing is, for people.
        offload_bytes: of offload memory, for KV and activations.
    """

    fronts: HostedFronts
    hosting: Hosting
    rows: FrontRows | None
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


def build_fronts(choice: FrontChoice, kv: PagedKV, stream_bytes: int) -> FrontParts:
    """Divide the bytes for fronts over KV and inputs, as rates or the user say.

    Args:
        choice: what of them is not transferred as it is.
        kv: whose first pages they are.
        stream_bytes: of the host.
    """
    part, why = choice.part_and_why()
    book = choice.book(choice.input_bytes(part, stream_bytes))
    input_bytes = 0 if book is None else book.num_blocks * book.block_tokens * choice.x_bytes
    fronts = HostedFronts(kv.memory, host_pool(kv.store, choice.layout, stream_bytes - input_bytes))
    fronts.read_positions = kv.store.page_positions
    rows, remaking = None, None
    if book is not None:
        rows = FrontRows(part)
        remaking = choice.remaking(book, rows)
    attention = choice.attention(kv, fronts)
    splits = None
    if remaking is not None or attention is not None:
        splits = choice.splits(makes=remaking is not None, attends=attention is not None)
    choice.say_fallbacks(why, recomputes=remaking is not None, attends=attention is not None)
    hosting = Hosting(
        kv.memory,
        fronts,
        choice.carrier(),
        splits=splits,
        remaking=remaking,
        remade=[group.name for group in choice.groups] if remaking is not None else (),
        attention=attention,
    )
    return FrontParts(fronts, hosting, rows, splits, why, stream_bytes)
