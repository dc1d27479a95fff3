"""Configurations of `python -m benchmarks offload`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadBenchConfig:
    """Configuration of all parts.

    Attributes:
        repeats: rounds of the part `restore`.
        restore_tokens: length of the prefix that the part `restore` loads.
        batches: batch sizes of the tables on the virtual clock.
        prompts: prompt lengths of these tables.
        generated: output lengths of these tables.
        layers: layers of models on the virtual clock; 0: all.
        engine_tokens: prompt length of the part `engine`.
        engine_steps: decode steps of the part `engine`.
        gain_rounds: rounds of the part `engine_gain`.
        gain_rows: its sequences, half of them in each batch that shares a layer.
        gain_tokens: prompt length of its sequences.
        gain_steps: decode steps of its sequences.
    """

    repeats: int = 5
    restore_tokens: int = 2048
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 48)
    prompts: tuple[int, ...] = (128, 256, 512, 1024)
    generated: tuple[int, ...] = (32, 128)
    layers: int = 0
    engine_tokens: int = 2048
    engine_steps: int = 24
    gain_rounds: int = 5
    gain_rows: int = 16
    gain_tokens: int = 256
    gain_steps: int = 7


QUICK_OFFLOAD = OffloadBenchConfig(
    repeats=2,
    restore_tokens=1024,
    batches=(1, 8, 32),
    prompts=(128, 1024),
    generated=(32,),
    layers=6,
    engine_tokens=512,
    engine_steps=8,
    gain_rounds=1,
    gain_tokens=64,
    gain_steps=5,
)
