"""Answer prompts with your own model in a KV memory of fixed size.

python examples/own_model.py                       the packaged model quire-tiny
python examples/own_model.py path/to/model         a folder in Hugging Face format
python examples/own_model.py Qwen/Qwen3-0.6B       a name on the Hugging Face Hub
"""

import sys

from quire import LLM, KVConfig, SamplingParams

PROMPTS = [
    "Once upon a time there was",
    "The ship left the harbour at",
    "My dear friend, I must tell you",
]


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "quire-tiny"
    llm = LLM(model, kv=KVConfig(memory="64MiB"))
    for output in llm.generate(PROMPTS, SamplingParams(max_tokens=32, temperature=0.8, seed=1)):
        prompt = llm.model.tokenizer.decode(output.prompt_token_ids)
        print(f"{prompt!r} -> {output.text!r}")
        print(
            f"    {output.usage.completion_tokens} tokens, {output.usage.kv_peak_bytes:,} B of KV"
        )
    stats = llm.stats()
    print(f"at most {stats.kv_peak_bytes:,} of {stats.kv_total_bytes:,} B of KV memory in use")


if __name__ == "__main__":
    main()
