"""An eviction rule in one file, run in the engine with its memory freed.

The rule retains the tokens at the start, the newest tokens, and those with the longest values.

    python examples/policy_in_one_file.py
"""

from dataclasses import dataclass

from torch import Tensor

from quire import LLM, KVConfig, SamplingParams
from quire.evals.tasks import make
from quire.policies.base import SinksAndRecent
from quire.policies.registry import register
from quire.policies.view import KVView


@register("long_values")
@dataclass(frozen=True, slots=True)
class LongValues(SinksAndRecent):
    """Retain the tokens with the longest values.

    Attributes:
        sinks: tokens at the start of the sequence that are never evicted.
        recent: number of newest cached tokens that are never evicted.
    """

    cost = "a read of the values at an eviction"

    def score(self, view: KVView) -> Tensor:
        """Return [lane, slot] scores; higher scores are retained."""
        return view.values.norm(dim=2)


def main() -> None:
    task = make("kv", seed=2, tokens=400, depth=0.9)
    greedy = SamplingParams(max_tokens=5, temperature=0.0)
    print("answer:", task.queries[0].answer)
    for evict in ("full", "long_values:cap=256,sinks=4,recent=128", "recent:cap=256,sinks=4"):
        llm = LLM("quire-tiny", kv=KVConfig(memory="16MiB", evict=evict))
        [output] = llm.generate("<|doc|>" + task.prompt(), greedy)
        print(f"{evict:40} {output.text!r:10} {output.usage.kv_peak_bytes:>10,} B of KV")
        llm.close()


if __name__ == "__main__":
    main()
