"""BATON with separate prefill and decoding: a free row is filled with a prefilled query.

step   row 0         row 1             prefill in the same step
7      decodes a     decodes b, ends   chunks of c, d and e, for the queue
8      decodes a     decodes c         next chunks
"""

from dataclasses import dataclass

from quire.errors import UnknownName
from quire.policies.options import check_at_least
from quire.scheduler.batchers.base import Batcher, BatchState, BatchView, DenseRule, PagedRule, Q
from quire.scheduler.batchers.insertion import FirstPrefilled
from quire.scheduler.batchers.prefill_order import similar_group
from quire.scheduler.batchers.prefilled import PrefilledQueue, QueueOptions

PREFILLS = ("async", "sync")
LOCATIONS = ("device", "host")
_MIN_GROUP_DIVISOR = 4  # of the batch's rows


@dataclass(frozen=True, slots=True)
class BatonPD(PagedRule, DenseRule):
    """Free rows are filled from a queue of prefilled queries; no row is idle while it has any.

    Source: Cong et al., BATON, section 4.2 (vector embedding with prefill and decoding apart).

    Differs from the paper: with paged KV, inserting a query needs no padding and no copy. The queue
    is prefilled in the same steps as the batch, within a token budget. On dense rows, prompts of
    similar length are prefilled separately and inserted without padding; the queue is that of the
    `DynamicBatch`.

    Attributes:
        queue: maximum rows of prefilled queries, in addition to the batch; 0: as many as the batch.
        tokens: maximum prompt tokens of a step with a full batch; 0: all tokens that are left.
        prefill: async (in the steps of the batch), sync (the whole queue whenever it is empty;
            no request decodes meanwhile).
        hold: where KV of the queue is held: device, or host (swapped in before a row ends).
        lead: number of steps before a row's end at which KV is swapped in.
        window: maximum waiting requests searched for similar lengths.
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
            raise UnknownName("prefill mode", self.prefill, PREFILLS)
        if self.hold not in LOCATIONS:
            raise UnknownName("location of prefilled KV", self.hold, LOCATIONS)

    def queue_options(self, max_num_seqs: int) -> QueueOptions:
        """Return the options of the queue for a batch of `max_num_seqs` rows."""
        return QueueOptions(
            rows=self.queue or max_num_seqs,
            tokens=self.tokens,
            prefills_apart=self.prefill == "sync",
            on_host=self.hold == "host",
            lead_steps=self.lead,
            window=self.window,
        )

    @property
    def swaps_out_prefilled(self) -> bool:
        return self.hold == "host"

    def num_rows(self, max_num_seqs: int) -> int:
        return max_num_seqs + self.queue_options(max_num_seqs).rows

    def make(self, state: BatchState) -> Batcher:
        return PrefilledQueue(state, self.queue_options(state.max_num_seqs), FirstPrefilled())

    def next_group(self, view: BatchView[Q]) -> list[Q]:
        """See `DenseRule`: the first query and similar ones, as many as there are free rows.

        At least a quarter of a batch is prefilled together. Larger groups would need fewer
        forwards, but their KV would be held for longer.
        """
        most = max(1, view.free, view.size // _MIN_GROUP_DIVISOR)
        return similar_group(view.waiting, most, view.group_tokens)
