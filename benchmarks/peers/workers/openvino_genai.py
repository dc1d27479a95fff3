"""OpenVINO GenAI's continuous batching, with full KV, its own eviction, or KVCrush.

`options` of the job: `start`, `recent` and `max` tokens of the eviction, and `kvcrush`, the tokens
that KVCrush selects among the evicted ones; without `max` nothing is evicted. `lookup`: tokens that
its prompt lookup proposes, with its default length of matches.
"""

import time
from importlib.metadata import version
from typing import Any

from benchmarks.peers.workers.protocol import (
    Job,
    Outputs,
    Result,
    file_bytes,
    peak_rss_bytes,
    serve,
)

BLOCK_TOKENS = 32  # fixed in OpenVINO's CPU plugin
_KV_TYPE = "f16"


def prepare(job: Job) -> None:
    """Convert the model to OpenVINO's format, with weights of 2 bytes."""
    import torch
    from optimum.intel import OVModelForCausalLM

    # a processor without bfloat16 arithmetic converts float16 weights in registers, bfloat16 not
    dtype = torch.bfloat16 if job["dtype"] == "bfloat16" else torch.float16
    model = OVModelForCausalLM.from_pretrained(
        job["model"], export=True, load_in_8bit=False, compile=False, dtype=dtype
    )
    model.save_pretrained(job["prepared"])


def scheduler(job: Job) -> Any:
    """Scheduler options: the number of blocks is the KV memory."""
    import openvino_genai as genai

    found = genai.SchedulerConfig()
    found.num_kv_blocks = job["kv_bytes"] // (BLOCK_TOKENS * job["kv_bytes_per_token"])
    found.max_num_batched_tokens = job["max_num_batched_tokens"]
    found.enable_prefix_caching = False
    options = job["options"]
    if "max" in options:
        found.use_cache_eviction = True
        more = {}
        if "kvcrush" in options:
            more["kvcrush_config"] = genai.KVCrushConfig(
                budget=options["kvcrush"] // BLOCK_TOKENS,
                anchor_point_mode=genai.KVCrushAnchorPointMode.MEAN,
            )
        found.cache_eviction_config = genai.CacheEvictionConfig(
            options["start"],
            options["recent"],
            options["max"],
            genai.AggregationMode.NORM_SUM,
            **more,
        )
    return found


def generate(
    pipeline: Any, prompts: list[list[int]], new_tokens: list[int], lookup: int
) -> Outputs:
    """Run prompts to their number of tokens."""
    import numpy as np
    import openvino
    import openvino_genai as genai

    outputs = Outputs(len(prompts))
    handles = []
    for i, (prompt, new) in enumerate(zip(prompts, new_tokens, strict=True)):
        options = genai.GenerationConfig()
        options.max_new_tokens, options.ignore_eos, options.do_sample = new, True, False
        if lookup:
            options.num_assistant_tokens, options.max_ngram_size = lookup, 3
        ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
        handles.append(pipeline.add_request(i, ids, options))
    while pipeline.has_non_finished_requests():
        pipeline.step()
        for i, handle in enumerate(handles):
            while handle.can_read():
                for found in handle.read().values():
                    outputs.add(i, list(found.generated_ids))
    return outputs


def weights_type(folder: str) -> str:
    """Element type of most weights in the converted model."""
    import openvino

    sizes: dict[str, int] = {}
    for node in openvino.Core().read_model(f"{folder}/openvino_model.xml").get_ordered_ops():
        if node.get_type_name() == "Constant":
            kind = node.get_element_type().get_type_name()
            sizes[kind] = sizes.get(kind, 0) + node.get_byte_size()
    return max(sizes, key=lambda kind: sizes[kind])


def run(job: Job) -> Result:
    """Run all prompts at once."""
    import openvino_genai as genai

    started_s = time.perf_counter()
    lookup = int(job["options"].get("lookup", 0))
    properties = {"INFERENCE_NUM_THREADS": job["threads"], "KV_CACHE_PRECISION": _KV_TYPE}
    properties |= {"prompt_lookup": True} if lookup else {}
    pipeline = genai.ContinuousBatchingPipeline(job["prepared"], scheduler(job), "CPU", properties)
    warm = job["warmup_prompts"]
    generate(pipeline, warm, [job["warmup_tokens"]] * len(warm), lookup)
    load_s = time.perf_counter() - started_s
    outputs = generate(pipeline, job["prompts"], job["new_tokens"], lookup)
    total_s = outputs.elapsed_s()
    metrics, peak = pipeline.get_metrics(), peak_rss_bytes()
    return Result(
        version=version("openvino-genai"),
        weights_type=weights_type(job["prepared"]),
        weight_bytes=file_bytes(job["prepared"], "openvino_model.bin"),
        kv_type=_KV_TYPE,
        kv_bytes=metrics.kv_cache_size_in_bytes,
        load_s=load_s,
        total_s=total_s,
        times_s=outputs.times_s,
        tokens=outputs.tokens,
        peak_rss_bytes=peak,
        figures={
            "max_cache_usage_percent": metrics.max_cache_usage,
            "avg_cache_usage_percent": metrics.avg_cache_usage,
        },
    )


if __name__ == "__main__":
    serve(prepare, run)
