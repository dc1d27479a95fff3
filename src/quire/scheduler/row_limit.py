"""How many sequences a KV memory can have rows for: their page tables lie in host memory."""

from quire.errors import ConfigError
from quire.kv.tables import table_bytes
from quire.layout.pages import CacheLayout
from quire.plan.container import free_host_bytes
from quire.plan.sizes import format_size


def refuse_too_many_rows(layout: CacheLayout, max_rows: int) -> None:
    """Refuse more rows than the host has memory for, before their page tables are allocated.

    Args:
        layout: lane groups of every sequence.
        max_rows: sequences at once: those of a batch, and those its batcher keeps beside it.

    Raises:
        ConfigError: the page tables would be larger than the free host memory.
    """
    needed_bytes = sum(table_bytes(group, max_rows) for group in layout.groups)
    free_bytes = free_host_bytes()
    if needed_bytes > free_bytes:
        raise ConfigError(
            f"page tables of {max_rows:,} sequences take {format_size(needed_bytes)} of host "
            f"memory, of which {format_size(free_bytes)} are free; lower --max-num-seqs"
        )
