"""Run one static batch to its end and measure its time."""

from dataclasses import replace

from quire.models.loader import LoadedModel
from quire.plan.batch_verdict import RunSeconds
from quire.profile.step_rates import RunShape, static_engine, timed_steps


def run_batch(model: LoadedModel, shape: RunShape, kv_bytes: int) -> RunSeconds:
    """Run a static batch to its end in a KV memory of the given bytes, after a short warm-up.

    Raises:
        InvariantError: the memory does not hold all rows at the same time.
    """
    warm = replace(shape, prompt_tokens=max(1, shape.prompt_tokens // 8), new_tokens=4)
    engine = static_engine(model, shape, kv_bytes)
    for _ in timed_steps(model, warm, engine):
        pass
    prefill_s = decode_s = 0.0
    for time in timed_steps(model, shape, engine):
        if time.step.decodes:
            decode_s += time.seconds
        else:
            prefill_s += time.seconds
    new_tokens = shape.rows * shape.new_tokens
    return RunSeconds(prefill_s=prefill_s, decode_s=decode_s, new_tokens=new_tokens)
