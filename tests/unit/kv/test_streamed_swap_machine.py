"""The state machine with swap copies that run as late as their ordering allows.

A page or host memory that is used again before its copy has run would have wrong bytes.
"""

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from quire.offload.swap.transfer import StreamedCopies
from support.host_array import CopyFailed
from support.lazy_copies import LazyWorker
from unit.kv.test_tiers_machine import TiersMachine


class FailingLazyWorker(LazyWorker):
    """Fails to start copies when the host array is to fail."""

    def __init__(self, host):
        super().__init__()
        self.host = host

    def submit(self, copy, num_bytes):
        if num_bytes and self.host.fail_after is not None:
            self.host.fail_after -= 1
            if self.host.fail_after < 0:
                raise CopyFailed
        return super().submit(copy, num_bytes)

    def run_until(self, number):
        fail_after, self.host.fail_after = self.host.fail_after, None
        super().run_until(number)
        self.host.fail_after = fail_after


class StreamedSwapMachine(TiersMachine):
    @initialize(kib=st.sampled_from([24, 40, 96]), host_kib=st.sampled_from([8, 32, 128]))
    def open_memory(self, kib, host_kib):
        TiersMachine.open_memory(self, kib, host_kib)
        self.worker = FailingLazyWorker(self.host)
        self.pool.copies = StreamedCopies(self.host, self.worker, self.memory.arena.fences)
        self.poison_free = self.store.poison_free
        self.store.poison_free = self.poison_free_once_copied

    def poison_free_once_copied(self, memory):
        """Free pages that a copy still reads have their bytes."""
        if not self.worker.num_waiting:
            self.poison_free(memory)

    @precondition(lambda self: self.worker.num_waiting)
    @rule(count=st.integers(1, 4))
    def copies_run(self, count):
        waiting = self.worker.num_waiting
        self.worker.run_until(self.worker.num_run + min(count, waiting) - 1)

    @invariant()
    def fences_are_copies_that_wait_or_ended(self):
        assert len(self.memory.arena.fences) <= len(self.worker.queued)


TestStreamedSwapMachine = StreamedSwapMachine.TestCase
