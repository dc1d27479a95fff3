"""BATON with prefill and decoding apart: a free row is filled with a query that has been prefilled.

step   row 0         row 1             beside them
7      decodes a     decodes b, ends   reads a part of c, d and e: the queue
8      decodes a     decodes c         reads on
"""

from dataclasses import dataclass

from quire.errors import UnknownName
from quire.policies.options import check_at_least
from quire.scheduler.batchers.base import Batcher, BatchState, BatchView, DenseRule, PagedRule, Q
from quire.scheduler.batchers.insertion import FirstPrefilled
from quire.scheduler.batchers.prefill_order import similar_group
from quire.scheduler.batchers.prefilled import PrefilledQueue, QueueOptions

PREFILLS = ("async", "sync")
PLACES = ("device", "host")
_READ_TOGETHER_SHARE = 4


@dataclass(frozen=True, slots=True)
class BatonPD(PagedRule, DenseRule):
    """A queue of prefilled queries stands behind the batch; no row is idle while it has any.

    Source: Cong et al., BATON, section 4.2 (vector embedding with prefill and decoding apart).

    Differs from the paper: in pages a query is inserted by naming its pages, so nothing is padded
    or copied; a queue that is prefilled beside the batch shares its steps, within a token budget.
    On dense rows prompts of similar length are read apart and enter rows without padding; the queue
    is that of the `DynamicBatch`.

    Attributes:
        queue: rows of prefilled queries at most, beside the batch; 0: as many as the batch has.
        tokens: of prompts read beside a full batch in a step; 0: whatever a step has left.
        prefill: async (between and beside decode steps), sync (the whole queue whenever it is
            empty, nobody decodes meanwhile).
        hold: where KV of the queue waits, device or host (fetched back before a row ends).
        lead: steps ahead of a row's end in which it is fetched.
        window: waiting requests among which those of similar length are looked for.
    """

    name = "baton_pd"

    reads_ahead = True

    queue: int = 0
    tokens: int = 256
    prefill: str = "async"
    hold: str = "device"
    lead: int = 4
    window: int = 64

    def __post_init__(self) -> None:
        check_at_least(0, queue=self.queue, tokens=self.tokens, lead=self.lead)
        check_at_least(1, window=self.window)
        if self.prefill not in PREFILLS:
            raise UnknownName("way of prefilling", self.prefill, PREFILLS)
        if self.hold not in PLACES:
            raise UnknownName("place of prefilled KV", self.hold, PLACES)

    def queue_options(self, max_num_seqs: int) -> QueueOptions:
        """Of the queue behind a batch of so many rows."""
        return QueueOptions(
            rows=self.queue or max_num_seqs,
            tokens=self.tokens,
            reads_apart=self.prefill == "sync",
            on_host=self.hold == "host",
            lead_steps=self.lead,
            window=self.window,
        )

    @property
    def holds_on_host(self) -> bool:
        """See `PagedRule`."""
        return self.hold == "host"

    def num_rows(self, max_num_seqs: int) -> int:
        """See `PagedRule`."""
        return max_num_seqs + self.queue_options(max_num_seqs).rows

    def make(self, state: BatchState) -> Batcher:
        """See `PagedRule`."""
        return PrefilledQueue(state, self.queue_options(state.max_num_seqs), FirstPrefilled())

    def next_group(self, view: BatchView[Q]) -> list[Q]:
        """See `DenseRule`: the first in line and similar ones, at most the free rows.

        Where fewer are free it is a quarter of a batch. More would be read in fewer forwards, and
        lie in memory for longer.
        """
        most = max(1, view.free, view.size // _READ_TOGETHER_SHARE)
        return similar_group(view.waiting, most, view.group_tokens)
