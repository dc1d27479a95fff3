"""Measures evictions of single tokens from pages of shared scales, which are encoded again.

    python -m benchmarks.quant.resealing [--tokens 1024] [--rounds 9]

Each round writes 64 tokens to every lane and evicts 64 random ones, without a model; codecs
alternate. Keys have channels of different magnitudes, as in models. Prints the time of an eviction,
medians of the rounds after the first, and the relative error of the retained keys after all rounds
and after one encoding. The last line is one JSON object.
"""

import argparse
import json
import statistics
import time

import numpy as np
import torch

from quire.kernels.backend import AttentionMath
from quire.kernels.gathered import GatheredAttention
from quire.kv.compaction import commit_compaction, plan_compaction
from quire.kv.lane_reader import LaneReader
from quire.kv.resealing import Resealing
from quire.kv.step import PagedKV, StepAttention, allocate_kv
from quire.layout.config import read_config
from quire.layout.layout import layout_for
from quire.layout.model import ModelSpec
from quire.models.source import find_model

EVERY, PAGE_TOKENS, SCRATCH_BYTES = 64, 32, 64 << 20
CODECS = (
    "int4",
    "int4_page/int4",
    "int4_page/int4+residual=64",
    "int2",
    "int2_page/int2",
    "int2_page/int2+residual=64",
)


class Lanes:
    """One sequence in pages of a codec, and its keys in full precision.

    Args:
        spec: heads and layers.
        codec: the KV codec.
        tokens: tokens before the first round.
    """

    def __init__(self, spec: ModelSpec, codec: str, tokens: int) -> None:
        self._spec = spec
        layout = layout_for(
            spec, codec=f"{codec}+plain=float32", page_tokens=PAGE_TOKENS, evicting=True
        )
        total_bytes = 2 * spec.kv_bytes(tokens + 4 * EVERY, 4) + (64 << 20)
        backend = GatheredAttention(torch.device("cpu"))
        self.kv: PagedKV = allocate_kv(
            layout, total_bytes, 2, device=torch.device("cpu"), backend=backend
        )
        self._row = self.kv.memory.start()
        self._random = np.random.default_rng(0)
        self._generator = torch.Generator().manual_seed(0)
        self._magnitudes = torch.logspace(-1, 1, spec.head_dim)
        self._exact: list[list[torch.Tensor]] = [[] for _ in spec.layers]
        per_page = layout.groups[0].page_class.per_page
        self._mover = Resealing(self.kv, "full", SCRATCH_BYTES) if per_page else None
        for _ in range(tokens // EVERY):
            self.write()

    def write(self) -> None:
        """Append 64 tokens to every lane."""
        rows, spec = np.array([self._row]), self._spec
        counts = np.array([EVERY], dtype=np.int32)
        self.kv.memory.grow(rows, counts)
        step = StepAttention(self.kv, rows, counts)
        shape = (EVERY, spec.num_kv_heads, spec.head_dim)
        for layer in range(spec.num_layers):
            key = torch.randn(shape, generator=self._generator) * self._magnitudes
            value = torch.randn(shape, generator=self._generator)
            query = torch.zeros(EVERY, spec.num_heads, spec.head_dim)
            step.attend(layer, AttentionMath(scale=1.0), query, key, value)
            self._exact[layer].append(key)

    def evict(self) -> float:
        """Evict 64 random tokens of every lane, the same of all; return seconds."""
        table = self.kv.memory.tables["full"]
        held = int(table.num_slots[self._row, 0])
        keep = np.ones((table.group.num_lanes, held), dtype=bool)
        keep[:, self._random.choice(held - EVERY, EVERY, replace=False)] = False
        start = time.perf_counter()
        plan = plan_compaction(self.kv.memory, "full", self._row, keep)
        commit_compaction(self.kv.memory, plan, mover=self._mover)
        return time.perf_counter() - start

    def error(self) -> float:
        """Relative error of the stored keys, over all retained tokens outside of the window."""
        reader = LaneReader(self.kv, "full", self._row)
        layers, keys, places = self._spec.num_layers, reader.keys(), reader.positions
        found = keys.view(layers, -1, *keys.shape[1:])
        positions = places.view(layers, -1, places.shape[1])
        length = int(self.kv.memory.lengths[self._row])
        wrong = whole = 0.0
        for layer, exact in enumerate(self._exact):
            older = positions[layer, 0] < length - 2 * EVERY
            expected = torch.cat(exact)[positions[layer, 0][older]].transpose(0, 1)
            wrong += float((found[layer][:, older] - expected).square().sum())
            whole += float(expected.square().sum())
        return float((wrong / whole) ** 0.5)


def main() -> None:
    """Print a line for each codec, then all of them as one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    spec = ModelSpec.from_config(read_config(find_model("quire-tiny")[0]))
    lanes = {codec: Lanes(spec, codec, options.tokens) for codec in CODECS}
    once = {codec: of.error() for codec, of in lanes.items()}
    times: dict[str, list[float]] = {codec: [] for codec in CODECS}
    with torch.inference_mode():
        for _ in range(options.rounds):
            for codec, of in lanes.items():
                of.write()
                times[codec].append(of.evict())
    found = {}
    for codec, of in lanes.items():
        found[codec] = {
            "evict_ms": round(statistics.median(times[codec][1:]) * 1e3, 2),
            "min_ms": round(min(times[codec][1:]) * 1e3, 2),
            "max_ms": round(max(times[codec][1:]) * 1e3, 2),
            "error_once": round(once[codec], 4),
            "error_after_rounds": round(of.error(), 4),
        }
        print(json.dumps({"codec": codec} | found[codec]))
    print(json.dumps({"tokens": options.tokens, "rounds": options.rounds, "codecs": found}))


if __name__ == "__main__":
    main()
