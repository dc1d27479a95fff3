"""Paper 001: all tables and charts of "KV Cache: The Hidden Memory Giant", in its order."""

from benchmarks.paper.kv_cache_allocation import (
    BLOCK_SIZE,
    SWAP_OR_RECOMPUTE,
    UTILIZATION,
    WASTE,
    WATERMARK,
)
from benchmarks.paper.kv_cache_quality import CACHE_OR_NOT, EVICTION, MMLU, QUANTIZATION
from benchmarks.paper.kv_cache_serving import DECODE_THROUGHPUT, END_TO_END, THROUGHPUT_STACK
from benchmarks.paper.kv_cache_sizes import (
    BANDWIDTH,
    MEMORY_LAYOUT,
    MODEL_SIZES,
    OPTIMIZED_LAYOUT,
    SIZE_BY_BATCH,
    WHEN_IT_MATTERS,
)

ITEMS = (
    CACHE_OR_NOT,
    MODEL_SIZES,
    MEMORY_LAYOUT,
    SIZE_BY_BATCH,
    WASTE,
    UTILIZATION,
    BLOCK_SIZE,
    QUANTIZATION,
    MMLU,
    EVICTION,
    BANDWIDTH,
    DECODE_THROUGHPUT,
    WATERMARK,
    SWAP_OR_RECOMPUTE,
    WHEN_IT_MATTERS,
    END_TO_END,
    THROUGHPUT_STACK,
    OPTIMIZED_LAYOUT,
)
