"""Transformers' `generate`: padded batches of all prompts that fit in the KV memory, in turn."""

import time

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel, StoppingCriteriaList

from benchmarks.common.transformers_runs import StepClock, greedy
from benchmarks.peers.workers.protocol import Job, Outputs, Result, peak_rss_bytes, serve


def load_model(job: Job) -> PreTrainedModel:
    """Load the model with SDPA; no token ends an output."""
    torch.set_num_threads(job["threads"])
    dtype = getattr(torch, job["dtype"])
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        job["model"], dtype=dtype, attn_implementation="sdpa"
    )
    assert model.generation_config is not None
    model.generation_config.eos_token_id = None
    torch.nn.Module.eval(model)
    return model


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of all parameters."""
    return sum(weight.numel() * weight.element_size() for weight in model.parameters())


def batches(job: Job) -> list[list[int]]:
    """Indices of the prompts of each batch, in their order.

    A batch is padded to its longest prompt and runs until its longest output is complete; it takes
    as many prompts as its KV memory holds at that length.
    """
    capacity = job["kv_bytes"] // (job["kv_bytes_per_token"] * _element_bytes(job) // 2)
    found: list[list[int]] = [[]]
    for i in range(len(job["prompts"])):
        if found[-1] and _padded_tokens(job, [*found[-1], i]) > capacity:
            found.append([])
        found[-1].append(i)
    return found


def _element_bytes(job: Job) -> int:
    size: int = getattr(torch, job["dtype"]).itemsize
    return size


def _padded_tokens(job: Job, batch: list[int]) -> int:
    longest = max(len(job["prompts"][i]) for i in batch) + max(job["new_tokens"][i] for i in batch)
    return longest * len(batch)


def generate(
    model: PreTrainedModel,
    prompts: list[list[int]],
    new_tokens: list[int],
    outputs: Outputs,
    indices: list[int],
) -> None:
    """Generate one batch, and record the tokens up to each prompt's own number.

    Args:
        model: the model.
        prompts: prompts of the batch.
        new_tokens: number of output tokens of each.
        outputs: record of the run.
        indices: index of each prompt in the record.
    """
    longest = max(map(len, prompts))
    padded = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    clock = StepClock(outputs.elapsed_s)
    with torch.inference_mode():
        found = model.generate(  # type: ignore[operator]
            torch.tensor(padded),
            attention_mask=torch.tensor(mask),
            generation_config=greedy(max(new_tokens)),
            stopping_criteria=StoppingCriteriaList([clock]),
        )
    answers = found[:, longest:].tolist()
    for i, answer, count in zip(indices, answers, new_tokens, strict=True):
        for token, time_s in zip(answer[:count], clock.times_s, strict=False):
            outputs.add(i, [token], time_s)


def run(job: Job) -> Result:
    """Run all batches."""
    started_s = time.perf_counter()
    model = load_model(job)
    warm = job["warmup_prompts"]
    counts = [job["warmup_tokens"]] * len(warm)
    generate(model, warm, counts, Outputs(len(warm)), list(range(len(warm))))
    load_s = time.perf_counter() - started_s
    found = batches(job)
    outputs = Outputs(len(job["prompts"]))
    for batch in found:
        prompts = [job["prompts"][i] for i in batch]
        generate(model, prompts, [job["new_tokens"][i] for i in batch], outputs, batch)
    total_s = outputs.elapsed_s()
    held = max(_padded_tokens(job, batch) for batch in found)
    return Result(
        version=transformers.__version__,
        weights_type=job["dtype"],
        weight_bytes=weight_bytes(model),
        kv_type=job["dtype"],
        kv_bytes=held * job["kv_bytes_per_token"] * _element_bytes(job) // 2,
        load_s=load_s,
        total_s=total_s,
        times_s=outputs.times_s,
        tokens=outputs.tokens,
        peak_rss_bytes=peak_rss_bytes(),
        figures={"batches": len(found)},
    )


if __name__ == "__main__":
    serve(None, run)
