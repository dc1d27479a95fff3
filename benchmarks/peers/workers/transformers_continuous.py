"""Transformers' continuous batching, with its own paged cache."""

import time
from typing import Any

import torch
import transformers
from transformers import ContinuousBatchingConfig

from benchmarks.common.transformers_runs import (
    PAGE_TOKENS,
    STEP_REQUESTS,
    STEP_TOKENS,
    greedy,
)
from benchmarks.peers.workers.protocol import Job, Outputs, Result, peak_rss_bytes, serve
from benchmarks.peers.workers.transformers_static import load_model, weight_bytes

_WAIT_S = 1.0


def generate(model: Any, job: Job, prompts: list[list[int]], new_tokens: list[int]) -> Outputs:
    """Run prompts through a new manager; its set-up is part of the time."""
    token_bytes = job["kv_bytes_per_token"] * getattr(torch, job["dtype"]).itemsize // 2
    outputs = Outputs(len(prompts))
    manager_of = model.continuous_batching_context_manager(
        generation_config=greedy(None, end_token=-1),
        continuous_batching_config=ContinuousBatchingConfig(
            num_blocks=job["kv_bytes"] // (token_bytes * PAGE_TOKENS),
            page_size=PAGE_TOKENS,
            max_batch_tokens=STEP_TOKENS,
            max_requests_per_batch=STEP_REQUESTS,
            allow_block_sharing=False,  # no two prompts share a prefix
        ),
        warmup=False,  # would capture CUDA graphs
    )
    with manager_of as manager:
        ids = {}
        started_s = time.perf_counter() - outputs.elapsed_s()
        for i, (prompt, count) in enumerate(zip(prompts, new_tokens, strict=True)):
            name = manager.add_request(prompt, max_new_tokens=count, record_timestamps=True)
            ids[name] = i
        while ids:
            found = manager.get_result(timeout=_WAIT_S)
            if found is not None and found.is_finished():
                if found.error is not None:
                    raise RuntimeError(found.error)
                i = ids.pop(found.request_id)
                for token, time_s in zip(found.generated_tokens, found.timestamps, strict=True):
                    outputs.add(i, [token], time_s - started_s)
            elif found is None and not manager.is_running():
                raise RuntimeError(f"the manager ended with {len(ids)} open requests")
    return outputs


def run(job: Job) -> Result:
    """Run all prompts at once."""
    started_s = time.perf_counter()
    model = load_model(job)
    with torch.inference_mode():
        warm = job["warmup_prompts"]
        generate(model, job, warm, [job["warmup_tokens"]] * len(warm))
        load_s = time.perf_counter() - started_s
        outputs = generate(model, job, job["prompts"], job["new_tokens"])
    return Result(
        version=transformers.__version__,
        weights_type=job["dtype"],
        weight_bytes=weight_bytes(model),
        kv_type=job["dtype"],
        kv_bytes=job["kv_bytes"],
        load_s=load_s,
        total_s=max(times_s[-1] for times_s in outputs.times_s),
        times_s=outputs.times_s,
        tokens=outputs.tokens,
        peak_rss_bytes=peak_rss_bytes(),
    )


if __name__ == "__main__":
    serve(None, run)
