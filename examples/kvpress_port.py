"""A press of kvpress as an eviction rule of Quire.

A press scores the keys and values of one layer, as tensors [batch, KV heads, tokens, head_dim]. A
rule scores all layers of a sequence, as [layers * KV heads, tokens, head_dim]. So a press that
needs neither hidden states nor attention weights is called once for each layer. This example
defines its own press. With kvpress installed, use `KnormPress` or `KeyDiffPress` instead.

    python examples/kvpress_port.py
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire import LLM, KVConfig, SamplingParams
from quire.evals.tasks import make
from quire.policies.base import SinksAndRecent
from quire.policies.registry import register
from quire.policies.view import KVView


class ValueTimesKeyPress:
    """A press in the form of kvpress: the product of the lengths of a token's value and key."""

    def score(
        self,
        module: Any,
        hidden_states: Any,
        keys: Tensor,
        values: Tensor,
        attentions: Any,
        kwargs: Any,
    ) -> Tensor:
        return values.norm(dim=-1) * keys.norm(dim=-1)


PRESSES = {"value_times_key": ValueTimesKeyPress()}


@register("press")
@dataclass(frozen=True, slots=True)
class PressRule(SinksAndRecent):
    """Retain the tokens that a press scores highest.

    Attributes:
        sinks: tokens at the start of the sequence that are never evicted.
        recent: number of newest cached tokens that are never evicted.
        name: one of PRESSES.
    """

    cost = "that of the press"

    name: str = "value_times_key"

    def score(self, view: KVView) -> Tensor:
        """Return [lane, slot] scores; higher scores are retained."""
        press = PRESSES[self.name]
        layers = zip(view.by_layer(view.keys), view.by_layer(view.values), strict=True)
        scores = [
            press.score(None, None, keys[None], values[None], None, {})[0]
            for keys, values in layers
        ]
        return torch.cat(scores)


def main() -> None:
    task = make("kv", seed=2, tokens=400, depth=0.9)
    greedy = SamplingParams(max_tokens=5, temperature=0.0)
    print("answer:", task.queries[0].answer)
    for ratio in (0.0, 0.25, 0.5):  # `compression_ratio` of kvpress: the fraction to remove
        evict = f"press:cap={1 - ratio:.0%},recent=64" if ratio else "full"
        llm = LLM("quire-tiny", kv=KVConfig(memory="16MiB", evict=evict))
        [output] = llm.generate("<|doc|>" + task.prompt(), greedy)
        print(f"{ratio:4.0%} removed: {output.text!r:10} {output.usage.kv_peak_bytes:>10,} B of KV")
        llm.close()


if __name__ == "__main__":
    main()
