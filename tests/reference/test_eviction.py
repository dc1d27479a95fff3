"""Eviction end to end: the cap holds, memory is freed, and only the rule chooses the tokens."""

import pytest
import torch

from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig
from quire.engine.core import Engine
from quire.errors import ConfigError, UnsoundCombination
from quire.models.loader import LoadedModel
from quire.scheduler.peaks import Need
from quire.scheduler.schedule_config import ScheduleConfig
from support import zoo
from support.engines import greedy, load, make_prompts

CAP, EVERY, SINKS = 24, 6, 2
EVICT = f"recent:cap={CAP},every={EVERY},sinks={SINKS}"
NEW_TOKENS = 30


class Recorder:
    """Wrapper of a sampler that records the logits of every step of every request."""

    def __init__(self, sampler):
        self.sampler = sampler
        self.logits: dict[str, list[torch.Tensor]] = {}

    def sample(self, logits, rows):
        for row_logits, request in zip(logits, rows, strict=True):
            self.logits.setdefault(request.request_id, []).append(row_logits.clone())
        return self.sampler.sample(logits, rows)


def run(
    model: LoadedModel,
    prompts: list[list[int]],
    *,
    evict: str = EVICT,
    page_tokens: int = 4,
    rows: float = 64,
    **schedule: int,
) -> tuple[Engine, dict[str, list[torch.Tensor]], dict[str, object]]:
    probe = Engine(model, KVConfig(memory="4MiB", page_tokens=page_tokens, evict=evict))
    longest = max(map(len, prompts)) + NEW_TOKENS
    need = Need(longest, eviction=probe.pool.eviction.spec)
    memory = int(rows * probe.scheduler.peaks.peak_bytes(need))
    engine = Engine(
        model,
        KVConfig(memory=memory, page_tokens=page_tokens, evict=evict),
        ScheduleConfig(**schedule),
    )
    recorder = Recorder(engine.sampling_step.sampler)
    engine.sampling_step.sampler = recorder
    for i, prompt in enumerate(prompts):
        engine.submit(GenerationRequest(prompt, greedy(NEW_TOKENS), request_id=f"r{i}"))
    usages = {}
    while engine.has_work:
        for delta in engine.step():
            if delta.usage is not None:
                assert delta.finish_reason == "length", delta.error
                usages[delta.request_id] = delta.usage
    engine.check()
    return engine, recorder.logits, usages


def largest_difference(ours, theirs) -> float:
    assert ours.keys() == theirs.keys()
    return max(
        float((a - b).abs().max())
        for key in ours
        for a, b in zip(ours[key], theirs[key], strict=True)
    )


@pytest.fixture(scope="module", params=["llama", "gemma2", "gpt2", "deepseek_v3"])
def model(request):
    return load(request.param)


@pytest.fixture(scope="module")
def prompts():
    return [*make_prompts(4, 10 * CAP, seed=5), [3, 5, 7] * (10 * CAP // 3)]


@pytest.fixture(scope="module")
def expected(model, prompts):
    """Logits of all prompts in one batch."""
    _, logits, _ = run(model, prompts)
    return logits


def seen_under_recent(length: int) -> torch.Tensor:
    """[query, key]: the keys that a query attends to, by the rule.

    Up to the cap all before it. After that tokens are read `every` at a time: a query finds the
    sinks, the newest that were left when its chunk began, and its chunk up to itself.
    """
    query, key = torch.arange(length)[:, None], torch.arange(length)
    chunk_start = CAP + (query - CAP) // EVERY * EVERY
    kept = (key < SINKS) | (key >= chunk_start - (CAP - EVERY - SINKS))
    return (key <= query) & (kept | (query < CAP))


def seen_in_window(length: int) -> torch.Tensor:
    """[query, key] of a layer with a sliding window, in which no rule evicts."""
    query, key = torch.arange(length)[:, None], torch.arange(length)
    return (key <= query) & (key > query - zoo.WINDOW_TOKENS)


def additive(seen: torch.Tensor) -> torch.Tensor:
    return torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)[None, None]


@torch.inference_mode()
def test_logits_equal_transformers_with_the_evicted_keys_masked(model, prompts, expected):
    transformers_model = zoo.build(model.name)
    for i, prompt in enumerate(prompts):
        ours = torch.stack(expected[f"r{i}"])
        ids = torch.tensor([prompt + ours[:-1].argmax(-1).tolist()])
        full, window = seen_under_recent(ids.shape[1]), seen_in_window(ids.shape[1])
        mask: object = additive(full)
        if model.name == "gemma2":  # its layers take turns
            mask = {"full_attention": additive(full), "sliding_attention": additive(window)}
        theirs = transformers_model(ids, attention_mask=mask, use_cache=False).logits[0]

        assert len(ids[0]) > CAP
        assert float((ours - theirs[len(prompt) - 1 :]).abs().max()) <= 1e-4


def test_logits_do_not_depend_on_batches_or_chunks(model, prompts, expected):
    _, alone, _ = run(model, prompts[:4], max_num_seqs=1)
    _, chunked, _ = run(model, prompts, chunk_tokens=7, max_num_batched_tokens=40)

    assert largest_difference({key: expected[key] for key in alone}, alone) <= 1e-4
    assert largest_difference(expected, chunked) <= 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_eviction_on_cuda_gives_the_logits_of_the_cpu(name, prompts):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    _, expected, _ = run(load(name), prompts)
    _, got, _ = run(load(name, "cuda"), prompts)

    on_cpu = {key: [row.cpu() for row in rows] for key, rows in got.items()}
    assert largest_difference(expected, on_cpu) <= 1e-3


def test_errors_of_a_policy_text_name_the_mistake(model):
    for text, hint in {
        "recant:cap=9": "recent",
        "recent": "needs a cap",
        "recent:cap=9,every=9": "every < cap",
        "recent:cap=9,every=4,sinks=5": "the rule needs 6",
        "recent:cap=9,every=4,sink=5": "sinks",
        "recent:cap=many": "expected a cap such as 512",
        "recent:cap=100,every=90": "step of 64 tokens",
        "full:cap=3": "no options",
    }.items():
        with pytest.raises(ConfigError, match=hint):
            Engine(
                model,
                KVConfig(memory="1MiB", evict=text),
                ScheduleConfig(max_num_batched_tokens=64),
            )


def test_a_policy_without_tokens_to_evict_is_rejected():
    with pytest.raises(UnsoundCombination, match="every layer of the model has a sliding window"):
        Engine(load("mistral"), KVConfig(memory="1MiB", evict=EVICT))
