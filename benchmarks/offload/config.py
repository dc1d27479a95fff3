"""Configurations of `python -m benchmarks offload`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadBenchConfig:
    """Configuration of all parts.

    Attributes:
        repeats: rounds of the part `restore`.
        restore_tokens: length of the prefix that the part `restore` loads.
        engine_tokens: prompt length of the part `engine`.
        engine_steps: decode steps of the part `engine`.
        gain_rounds: rounds of the part `engine_gain`.
        gain_rows: its sequences, half of them in each batch that shares a layer.
        gain_tokens: prompt length of its sequences.
        gain_steps: decode steps of its sequences.
        sparse_rows: sequences of the part `sparse`.
        sparse_tokens: prompt length of its sequences.
        sparse_steps: decode steps of its sequences.
        sparse_rounds: measured turns of the part `sparse_memory`, which has the same sequences.
        sparse_page_tokens: tokens of its pages.
        sparse_memory: KV memory of the part `sparse` as a fraction of the whole KV.
    """

    repeats: int = 5
    restore_tokens: int = 2048
    engine_tokens: int = 2048
    engine_steps: int = 24
    gain_rounds: int = 5
    gain_rows: int = 16
    gain_tokens: int = 256
    gain_steps: int = 7
    sparse_rows: int = 8
    sparse_tokens: int = 16_384
    sparse_steps: int = 8
    sparse_rounds: int = 5
    sparse_page_tokens: int = 64
    sparse_memory: float = 0.2


QUICK_OFFLOAD = OffloadBenchConfig(
    repeats=2,
    restore_tokens=1024,
    engine_tokens=512,
    engine_steps=8,
    gain_rounds=1,
    gain_tokens=64,
    gain_steps=5,
    sparse_rows=2,
    sparse_tokens=1024,
    sparse_rounds=2,
    sparse_page_tokens=16,
    sparse_memory=0.35,
)
