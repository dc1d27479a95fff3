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
    """

    repeats: int = 5
    restore_tokens: int = 2048
    engine_tokens: int = 2048
    engine_steps: int = 24
    gain_rounds: int = 5
    gain_rows: int = 16
    gain_tokens: int = 256
    gain_steps: int = 7


QUICK_OFFLOAD = OffloadBenchConfig(
    repeats=2,
    restore_tokens=1024,
    engine_tokens=512,
    engine_steps=8,
    gain_rounds=1,
    gain_tokens=64,
    gain_steps=5,
)
