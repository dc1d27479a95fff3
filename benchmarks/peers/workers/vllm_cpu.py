"""vLLM on a CPU: its engine inside this process, stepped until all requests are complete."""

import os
import time
from itertools import count
from typing import Any

from benchmarks.peers.workers.protocol import (
    Job,
    Outputs,
    Result,
    file_bytes,
    peak_rss_bytes,
    serve,
)

_ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_IDS = count()  # two requests of one engine must not share an id


def set_environment(job: Job) -> None:
    """Set variables that vLLM reads when it is imported."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # tokens are timed where they are made
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # all engines run unbound
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["OMP_NUM_THREADS"] = str(job["threads"])


def load(job: Job) -> Any:
    """Load the model; prefix caching is off, so that every prompt is prefilled."""
    from vllm import LLM

    lengths = (
        len(prompt) + new for prompt, new in zip(job["prompts"], job["new_tokens"], strict=True)
    )
    return LLM(
        job["model"],
        skip_tokenizer_init=True,
        dtype=job["dtype"],
        max_model_len=max(lengths),
        kv_cache_memory_bytes=job["kv_bytes"],
        max_num_batched_tokens=job["max_num_batched_tokens"],
        enable_prefix_caching=False,
        disable_log_stats=True,
        **job["options"],
    ).llm_engine


def generate(engine: Any, prompts: list[list[int]], new_tokens: list[int]) -> Outputs:
    """Run prompts to their number of tokens."""
    from vllm import SamplingParams

    outputs = Outputs(len(prompts))
    indices = {}
    for i, (prompt, new) in enumerate(zip(prompts, new_tokens, strict=True)):
        name = str(next(_IDS))
        options = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        engine.add_request(name, {"prompt_token_ids": prompt}, options)
        indices[name] = i
    while engine.has_unfinished_requests():
        for found in engine.step():
            i = indices[found.request_id]
            known = len(outputs.tokens[i])
            outputs.add(i, list(found.outputs[0].token_ids)[known:])
    return outputs


def run(job: Job) -> Result:
    """Run all prompts at once."""
    set_environment(job)
    started_s = time.perf_counter()
    engine = load(job)
    warm = job["warmup_prompts"]
    generate(engine, warm, [job["warmup_tokens"]] * len(warm))
    load_s = time.perf_counter() - started_s
    outputs = generate(engine, job["prompts"], job["new_tokens"])
    total_s = outputs.elapsed_s()
    cache = engine.vllm_config.cache_config
    kv_type = job["dtype"] if cache.cache_dtype == "auto" else cache.cache_dtype
    token_bytes = job["kv_bytes_per_token"] * _ELEMENT_BYTES.get(kv_type, 1) // 2
    import vllm

    return Result(
        version=vllm.__version__,
        weights_type=job["dtype"],
        # the checkpoint is bfloat16
        weight_bytes=file_bytes(job["model"], "*.safetensors") * _ELEMENT_BYTES[job["dtype"]] // 2,
        kv_type=kv_type,
        kv_bytes=cache.num_gpu_blocks * cache.block_size * token_bytes,
        load_s=load_s,
        total_s=total_s,
        times_s=outputs.times_s,
        tokens=outputs.tokens,
        peak_rss_bytes=peak_rss_bytes(),
        figures={"block_size": cache.block_size, "num_blocks": cache.num_gpu_blocks},
    )


if __name__ == "__main__":
    serve(None, run)
