"""Paper 002: tables and figures of KVCrush (Jha et al. 2025), in order."""

from benchmarks.paper import kvcrush_long_bench, kvcrush_pages

ITEMS = (
    kvcrush_pages.TABLE_1,
    kvcrush_pages.TABLE_2,
    kvcrush_long_bench.TABLE_3,
    kvcrush_long_bench.FIGURE_5,
    kvcrush_pages.FIGURE_6,
    kvcrush_long_bench.FIGURE_7,
    kvcrush_pages.FIGURE_8,
)
