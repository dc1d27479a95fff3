"""The five papers by number, each with all of its items."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from benchmarks.paper import batch_max, baton, kv_cache, kvcrush, kvpr
from benchmarks.paper.item import Item
from quire.errors import UnknownName


@dataclass(frozen=True, slots=True, kw_only=True)
class Paper:
    """One paper.

    Attributes:
        id: number.
        title: short title with the source.
        items: tables and figures in the paper's order.
    """

    id: str
    title: str
    items: tuple[Item, ...]

    @property
    def by_id(self) -> dict[str, Item]:
        """Items by id."""
        return {item.id: item for item in self.items}


_LISTED = (
    Paper(
        id="000",
        title="Batch-Max: Higher LLM Throughput using Larger Batch Sizes and KV Cache Compression",
        items=batch_max.ITEMS,
    ),
    Paper(
        id="001",
        title="KV Cache: The Hidden Memory Giant in LLM Serving",
        items=kv_cache.ITEMS,
    ),
    Paper(
        id="002",
        title="KVCrush: Key Value Cache size-reduction using similarity in head-behaviour",
        items=kvcrush.ITEMS,
    ),
    Paper(
        id="003",
        title="KVPR: offloaded KV that is transferred in one part and recomputed in another",
        items=kvpr.ITEMS,
    ),
    Paper(
        id="004",
        title="BATON: Enhancing Batch-wise Inference Efficiency for Large Language Models via "
        "Dynamic Re-batching",
        items=baton.ITEMS,
    ),
)
PAPERS: Mapping[str, Paper] = MappingProxyType({paper.id: paper for paper in _LISTED})


def paper_named(name: str) -> Paper:
    """The paper with a number.

    Raises:
        UnknownName: no such paper.
    """
    if name not in PAPERS:
        raise UnknownName("paper", name, PAPERS)
    return PAPERS[name]
