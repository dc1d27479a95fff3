"""Python objects that generated tokens leave: `python -m support.left_objects`.

Runs in a process of its own, as type checks of tests keep objects. The last line of the output is a
JSON list with one object per KV memory.
"""

import gc
import json
import random
import tracemalloc

import torch

from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.scheduler.events import EventLog
from quire.scheduler.schedule_config import ScheduleConfig
from support import engines

ROUNDS, ROUND_TOKENS, CANCELLED = 14, 500, 0.02
MAX_NUM_SEQS, MAX_PROMPT_TOKENS, MAX_NEW_TOKENS = 16, 24, 32
MEMORIES = (("48KiB", "full"), ("32KiB", "recent:cap=16,every=4,sinks=2"))


def generate(engine: Engine, rng: random.Random) -> int:
    """Generate a round's tokens of random requests, some cancelled; finish all requests."""
    generated = 0
    while generated < ROUND_TOKENS or engine.has_work:
        if generated < ROUND_TOKENS and engine.scheduler.num_waiting < MAX_NUM_SEQS // 8:
            arrive(engine, rng)
        generated += sum(len(delta.token_ids) for delta in engine.step())
    engine.check()
    return generated


def arrive(engine: Engine, rng: random.Random) -> None:
    for _ in range(rng.randint(0, 3)):
        length = rng.randint(1, MAX_PROMPT_TOKENS)
        prompt = [rng.randrange(engine.model.spec.vocab_size) for _ in range(length)]
        drawn = {
            "max_tokens": rng.randint(1, MAX_NEW_TOKENS),
            "temperature": rng.choice([0.0, 1.0]),
        }
        drawn |= {"top_p": rng.choice([0.9, 1.0]), "repetition_penalty": rng.choice([1.0, 1.1])}
        drawn |= {"logprobs": rng.choice([None, None, None, 3]), "seed": rng.getrandbits(32)}
        params = SamplingParams(**drawn, ignore_eos=True)
        request_id = engine.submit(GenerationRequest(prompt, params))
        if rng.random() < CANCELLED:
            engine.cancel(request_id)
    running = engine.scheduler.running
    if running and rng.random() < CANCELLED:
        engine.cancel(rng.choice(running).request_id)


def left_bytes(memory: str, evict: str) -> dict[str, object]:
    """Bytes left for each generated token, by round, and the preemptions of all rounds."""
    engine = Engine(
        engines.load("llama"),
        KVConfig(memory=memory, page_tokens=4, evict=evict),
        ScheduleConfig(max_num_seqs=MAX_NUM_SEQS),
        events=EventLog(kept=64),  # a small log is full at once, not after thousands of tokens
    )
    rng = random.Random(0)
    tracemalloc.start()
    before, grown = 0, []
    for _ in range(ROUNDS):
        tokens = generate(engine, rng)
        gc.collect()
        now = tracemalloc.get_traced_memory()[0]
        grown.append((now - before) / tokens)
        before = now
    tracemalloc.stop()
    return {"bytes_per_token": grown, "preemptions": engine.scheduler.num_preemptions}


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps([left_bytes(*memory) for memory in MEMORIES]))
