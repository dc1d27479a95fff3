"""Evict tokens inside `model.generate` of Transformers, and free their memory.

python examples/quire_cache.py
"""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from quire.evals.tasks import make
from quire.hf import QuireCache
from quire.models.source import find_model


def main() -> None:
    folder, _ = find_model("quire-tiny")  # a folder; the name of a model on the Hub works as well
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    task = make("kv", seed=2, tokens=400, depth=0.3)
    inputs = tokenizer("<|doc|>" + task.prompt(), return_tensors="pt")
    print("answer:", task.queries[0].answer)
    for policy, ratio in (("full", None), ("recent:sinks=4", 0.5), ("snapkv", 0.5)):
        when = None if ratio is None else "prefill_end"
        with QuireCache(model, policy, compression_ratio=ratio, when=when) as cache:
            tokens = model.generate(**inputs, max_new_tokens=5, cache=cache)
            print(f"{policy:16} {tokenizer.decode(tokens[0, -5:]):8} {cache.kv_used_bytes:>10,} B")


if __name__ == "__main__":
    main()
