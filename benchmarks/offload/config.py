"""Configurations of `python -m benchmarks offload`."""

from dataclasses import dataclass, field

from benchmarks.offload.layer_shape import LayerShape
from benchmarks.offload.simulated_machine import Ratios


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadBenchConfig:
    """Configuration of all parts.

    Attributes:
        shape: shape of steps on threads.
        ratios: ratios of the part `arms`: rho and xi of OPT-13B on an A100 with PCIe 4.
        others: rho of further machines, by name, compared with prefetching.
        repeats: rounds of all arms.
        sweep_shape: shape of the part `sweep`.
        rhos, xis: ratios of the part `sweep`.
        hosts: ratios u / k of the part `host`.
        refit_steps: steps of the part `refit`, both before and after the link changes.
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

    shape: LayerShape = field(default_factory=lambda: LayerShape(tokens=4096))
    ratios: Ratios = field(default_factory=Ratios)
    others: tuple[tuple[str, float], ...] = (("rtx5000", 0.85), ("h200", 0.35))
    repeats: int = 5
    sweep_shape: LayerShape = field(default_factory=lambda: LayerShape(tokens=2048, num_layers=12))
    rhos: tuple[float, ...] = (0.1, 0.35, 0.5, 1.0, 2.0)
    xis: tuple[float, ...] = (0.5, 1.0, 2.0)
    hosts: tuple[float, ...] = (1.0, 0.5)
    refit_steps: int = 12
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
    shape=LayerShape(tokens=2048, num_layers=8),
    repeats=2,
    sweep_shape=LayerShape(tokens=1024, num_layers=6),
    rhos=(0.35, 1.0),
    xis=(0.5, 2.0),
    hosts=(1.0,),
    refit_steps=6,
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
