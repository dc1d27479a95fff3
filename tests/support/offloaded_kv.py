"""A small KV memory with KV offload, whose staging can be poisoned."""

import time
from functools import partial

import torch

from quire.kernels.backend import AttentionMath
from quire.kernels.gathered import GatheredAttention
from quire.kv.memory import KVMemory
from quire.kv.paged_kv import PagedKV
from quire.kv.store import PageStore
from quire.layout.layout import layout_for
from quire.offload.kv.offloaded_prefixes import OffloadedPrefixes
from quire.offload.kv.step_offload import KVOffload
from quire.offload.swap.host_pool import HostPool
from quire.offload.swap.host_store import host_copies
from quire.offload.swap.transfer import ThreadTransferWorker
from support.model_specs import small_spec

CPU = torch.device("cpu")
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE = 4, 2, 8, 4
MODEL = small_spec(None, None, 9, None, None, None)
FULL_LAYERS = 5
MATH = AttentionMath(scale=0.5)


class SlowTransferWorker(ThreadTransferWorker):
    """Delays every copy: attention that does not wait reads NaN."""

    def submit(self, copy, num_bytes):
        def slowly():
            time.sleep(0.002)
            copy()

        return super().submit(slowly, num_bytes)


def make(
    codec="float32",
    *,
    backend=None,
    transfer_worker=None,
    evicting=False,
    sequences=8,
    host_bytes=1 << 20,
):
    """Make a KV memory with KV offload; the arena is filled with NaN."""
    layout = layout_for(MODEL, codec=codec, page_tokens=PAGE, evicting=evicting)
    backend = backend or GatheredAttention(CPU)
    make_store = partial(PageStore, device=CPU, mover=backend.move)
    total_bytes = layout.smallest_sequence_bytes * 8 * sequences
    memory = KVMemory(layout, total_bytes, max_rows=8, store=make_store)
    memory.store.arena.fill_(0xFF)
    pool = HostPool(host_bytes, host_copies(memory.store, host_bytes, 1))
    prefixes = OffloadedPrefixes(memory, pool, memory.store.page_positions)
    kv_offload = KVOffload(memory, prefixes, transfer_worker or ThreadTransferWorker())
    return PagedKV(memory, memory.store, backend, offload=kv_offload)


def poison(kv):
    prefixes = kv.offload.prefixes
    prefixes.use.clear()  # its staging pages are overwritten
    for row in prefixes.rows:
        for page_group in prefixes.page_groups(row):
            page_class = kv.memory.tables[page_group.group].group.page_class
            whole = kv.store.views(page_class).whole
            whole[torch.from_numpy(page_group.staging.reshape(-1)).long()] = 0xFF
