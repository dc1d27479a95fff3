"""Compare eviction rules by answers and KV bytes, and draw the result.

The prompts list key-value pairs and ask for one value; all rules get the same prompts. Each rule
has a cap on the tokens of each KV head, during prefill and decoding. The picture shows the fraction
of exact answers over the mean peak of a request's KV bytes.

    python examples/compare_policies.py [PICTURE]  # pip install "quire-llm[report]"
"""

import sys
from statistics import mean

import matplotlib.pyplot as plt

from quire import LLM, KVConfig, SamplingParams
from quire.evals.tasks import make

RULES = ("recent:sinks=4", "keydiff:recent=32", "h2o:recent=32")
CAPS = (128, 384)
PROMPTS = 10


def answers(llm: LLM) -> tuple[float, float]:
    """Return the fraction of exact answers, and the mean peak of KV bytes."""
    tasks = [make("kv", seed=seed, tokens=400) for seed in range(PROMPTS)]
    prompts = ["<|doc|>" + task.prompt() for task in tasks]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=5, temperature=0.0))
    right = [o.text.startswith(t.queries[0].answer) for o, t in zip(outputs, tasks, strict=True)]
    return mean(right), mean(output.usage.kv_peak_bytes for output in outputs)


def measured(evict: str) -> tuple[float, float]:
    llm = LLM("quire-tiny", kv=KVConfig(memory="64MiB", evict=evict))
    try:
        return answers(llm)
    finally:
        llm.close()


def main() -> None:
    picture = sys.argv[1] if len(sys.argv) > 1 else "policies.png"
    full, full_bytes = measured("full")
    print(f"{'full':24} {full:5.2f} {full_bytes:>12,.0f} B")
    plt.scatter([full_bytes], [full], marker="*", s=120, color="black", label="full")
    for rule in RULES:
        points = []
        for cap in CAPS:
            evict = f"{rule}{',' if ':' in rule else ':'}cap={cap}"
            quality, kv_bytes = measured(evict)
            points.append((kv_bytes, quality))
            print(f"{rule:18} {cap:5} {quality:5.2f} {kv_bytes:>12,.0f} B", flush=True)
        plt.plot(*zip(*points, strict=True), marker="o", label=rule)
    plt.xlabel("peak KV bytes of a request")
    plt.ylabel("exact answers")
    plt.legend()
    plt.savefig(picture, dpi=120)
    print(f"wrote {picture}")


if __name__ == "__main__":
    main()
