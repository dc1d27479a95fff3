"""Takes requests out of the KV memory to make room, brings them back, and knows what that costs."""

from collections.abc import Callable, Iterable, Sequence

from quire.kv.repacking import repack
from quire.kv.stored_sequences import Swapped
from quire.kv.swap import can_swap_in
from quire.plan.cost import Choice
from quire.scheduler.group import distinct_bytes, same_group, together
from quire.scheduler.preemption.swapper import Swapper
from quire.scheduler.preemption.victims import choose_victim, may_be_preempted, reclaimable_bytes
from quire.scheduler.request import Request, RequestState
from quire.scheduler.sequence_memory import SequenceMemory


class Preempter:
    """Chooses who gives way, takes it out and brings it back.

    Args:
        sequence_memory: requests' rows in the pool.
        swapper: moves KV to the host; None where everything is computed again.
        owes: whether a request's tenant holds more than its share.

    Attributes:
        num_preemptions: so far.
    """

    def __init__(
        self,
        sequence_memory: SequenceMemory,
        swapper: Swapper | None = None,
        owes: Callable[[Request], bool] = lambda request: False,
    ) -> None:
        self.swapper = swapper
        self.num_preemptions = 0
        self._sequence_memory, self._memory = sequence_memory, sequence_memory.memory
        self._owes = owes
        self._away: dict[int, list[Request]] = {}  # by identity of what was swapped

    # ---- who -----------------------------------------------------------------------------------

    def order(self, request: Request) -> tuple[bool, int, float, int]:
        """Who goes before whom: those who owe nothing, then by their own order."""
        return (self._owes(request), *request.order)

    def victim(
        self, running: Iterable[Request], first: Request, *, even_returned: bool = False
    ) -> Request | None:
        """The request that gives way to `first`; None where nobody may.

        Args:
            running: all that hold KV.
            first: needs room. It and whatever goes before it never give way to it, so that the
                first in line always moves on; neither do those of its group.
            even_returned: also those that have not moved on since they came back, and whatever
                their tenants owe; for when nobody moves at all.
        """
        order = (lambda r: r.order) if even_returned else self.order
        behind = [r for r in running if order(r) > order(first) and not same_group(r, first)]
        return self.victim_among(behind, even_returned=even_returned)

    def victim_among(
        self, requests: Iterable[Request], *, even_returned: bool = False
    ) -> Request | None:
        """The one of these that gives way first; None where nobody may."""
        candidates = [r for r in requests if even_returned or may_be_preempted(r)]
        return choose_victim(candidates, self._worth, self._owes)

    def _worth(self, request: Request) -> float:
        """Bytes won for a token of lost work, less where the answer is nearly done.

        Source: vLLM's proposal 56897 (reclaimable blocks over tokens, times 1 - progress).
        """
        done = len(request.output_token_ids) / max(1, request.params.max_tokens)
        leaving = [member for member in together(request) if member.row >= 0]
        lost_tokens = sum(member.num_computed for member in leaving)
        return reclaimable_bytes(self._memory, leaving) / max(1, lost_tokens) * (1 - done)

    # ---- out -----------------------------------------------------------------------------------

    def take_out(
        self,
        requests: Sequence[Request],
        reason: str,
        *,
        whole: bool = False,
        recompute: bool = False,
    ) -> None:
        """Free the memory of running requests that leave together.

        Args:
            requests: one, or those of a group that hold KV.
            reason: for people.
            whole: all of it goes to the host where that has room, whatever it costs.
            recompute: nothing goes to the host.
        """
        lost_tokens = sum(request.num_computed for request in requests)
        freed_bytes = distinct_bytes(self._memory, [request.row for request in requests])
        how = "recompute" if recompute else self._move_away(requests, freed_bytes, whole=whole)
        self.num_preemptions += 1
        for request in requests:
            request.preemptions += 1
            if request.row >= 0:
                self._sequence_memory.leave(request, "preempted")
        self._sequence_memory.events.emit(
            "preempted",
            requests[0],
            how=how,
            reason=reason,
            lost_tokens=0 if how == "swap" else lost_tokens,
            freed_bytes=freed_bytes,
        )

    def _move_away(self, requests: Sequence[Request], kv_bytes: int, *, whole: bool) -> str:
        """Copy to the host what is worth it; say how they come back."""
        if any(request.swapped is not None for request in requests):
            return "hybrid"  # its tail is there already
        prefix_offloader = self._sequence_memory.prefix_offloader
        if prefix_offloader is not None and any(map(prefix_offloader.is_staged, requests)):
            return "recompute"  # its first pages are apart from the rest
        if self.swapper is None:
            return "recompute"
        choice = self.swapper.whole(kv_bytes) if whole else None
        choice = choice or self.swapper.choose(requests, kv_bytes)
        if choice.how == "recompute" or not self._copy_out(requests, choice):
            return "recompute"
        return choice.how

    def set_aside(self, requests: Sequence[Request]) -> bool:
        """Copy requests that leave together to the host, whole, where it has room.

        They are no victims: nothing is counted or told but the copy.

        Returns:
            Whether they are gone; else they run on.
        """
        prefix_offloader = self._sequence_memory.prefix_offloader
        if self.swapper is None or any(request.swapped is not None for request in requests):
            return False
        if prefix_offloader is not None and any(map(prefix_offloader.is_staged, requests)):
            return False  # its first pages are apart from the rest
        kv_bytes = distinct_bytes(self._memory, [request.row for request in requests])
        choice = self.swapper.whole(kv_bytes)
        return choice is not None and self._copy_out(requests, choice)

    def _copy_out(self, requests: Sequence[Request], choice: Choice) -> bool:
        """Whether they are on the host now, without rows; where a copy failed they still run."""
        assert self.swapper is not None
        held = [self._sequence_memory.note_peak(request) for request in requests]
        swapped = self.swapper.out(requests, choice)
        if swapped is None:
            return False
        for request, held_bytes in zip(requests, held, strict=True):
            request.swapped = swapped
            self._sequence_memory.note_gone(request, held_bytes, "swapped out")
        self._away[id(swapped)] = list(requests)
        self._tell("swapped_out", requests[0], swapped)
        return True

    # ---- back ----------------------------------------------------------------------------------

    def is_whole(self, request: Request) -> bool:
        """Whether all of a waiting request's KV is on the host."""
        return request.swapped is not None and not request.swapped.keep_from

    def has_place(self, request: Request) -> bool:
        """Whether what a waiting request has on the host finds pages, cached ones dropped."""
        swapped = request.swapped
        if swapped is None or swapped.keep_from:
            return True
        self._sequence_memory.sharing.make_room(dict(swapped.pages))
        return can_swap_in(self._memory, swapped)

    def give_up(self, request: Request) -> None:
        """Let go of what a request and those that left with it have on the host."""
        for member in list(self._away.get(id(request.swapped), [])):
            self.forget(member)

    def head_tokens(self, request: Request) -> int | None:
        """Tokens to compute again before a tail can be put behind them; None without a tail."""
        swapped = request.swapped
        return None if swapped is None else swapped.keep_from or None

    def bring_back(self, request: Request) -> list[Request]:
        """Give a request, and those that left with it, their KV back.

        Returns:
            Those that have it again; none where a copy failed, and then it is gone from the host
            too.
        """
        swapped = request.swapped
        assert swapped is not None
        assert self.swapper is not None
        returned = self._away.pop(id(swapped))
        rows = self.swapper.back(swapped)
        for member in returned:
            member.swapped = None
        if rows is None:
            return []
        for member, row, sequence in zip(returned, rows, swapped.sequences, strict=True):
            if member.state is RequestState.FINISHED:  # cancelled while it was away
                self._memory.release([row])
            else:
                self._sequence_memory.come_back(member, row, sequence.length)
        self._tell("swapped_in", request, swapped)
        return [member for member in returned if member.row >= 0]

    def append_tail(self, request: Request) -> bool:
        """Put the tail behind a head that has been computed again, where there is room for it."""
        swapped = request.swapped
        assert swapped is not None
        assert self.swapper is not None
        if not self._sequence_memory.sharing.make_room(self.swapper.needed(swapped)):
            return False
        self._away.pop(id(swapped))
        request.swapped = None
        if self.swapper.back_behind(swapped, request.row):
            request.num_computed = swapped.sequences[0].length
            self._tell("swapped_in", request, swapped)
        return True

    def _tell(self, kind: str, request: Request, swapped: Swapped) -> None:
        assert self.swapper is not None
        seconds = self.swapper.last_copy_s
        self._sequence_memory.events.emit(
            kind, request, kv_bytes=swapped.num_bytes, seconds=seconds
        )

    def forget(self, request: Request) -> None:
        """A request needs its KV no more: nothing of it stays on the host."""
        swapped, request.swapped = request.swapped, None
        if swapped is not None:
            away = self._away[id(swapped)]
            if all(member.swapped is None for member in away):
                del self._away[id(swapped)]
                swapped.discard()

    def pack(self, request: Request) -> None:
        """Move the pages of a request that is alone, or of its group, together.

        They may lie between places of pages that are gone, and so keep more slabs than they fill
        from the other page classes. Packed, a request that was admitted can always grow.
        """
        members = [member for member in together(request) if member.row >= 0]
        for member in members:
            self._sequence_memory.sharing.stop_sharing(member)
            if self._sequence_memory.prefix_loader is not None:
                self._sequence_memory.prefix_loader.forget(member)
        self._sequence_memory.sharing.drop_cached()
        repack(self._memory, *(member.row for member in members))

    def halve_staging(self, request: Request) -> None:
        """Leave a request that is alone one staging slot for its offloaded pages."""
        if self._sequence_memory.prefix_offloader is not None:
            self._sequence_memory.prefix_offloader.halve_staging(request)
