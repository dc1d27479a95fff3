"""Recurrent states in the KV memory: their bytes, and turns of a conversation."""

import pytest

from models.tiny import build
from quire.config.generation_request import GenerationRequest
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.errors import UnsoundCombination
from quire.layout.model import ModelSpec
from quire.models.loader import load_model
from quire.scheduler.schedule_config import ScheduleConfig
from support.kv_options import kv_config

PAGE_TOKENS, NEW_TOKENS, TURN_TOKENS = 16, 9, 11
HYBRIDS = ("qwen3_next", "lfm2")


@pytest.fixture(scope="module", params=HYBRIDS)
def loaded(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    build(request.param).save_pretrained(folder)
    return load_model(folder, dtype="float32", device="cpu")


def engine_of(loaded, **options) -> Engine:
    config = kv_config(memory="4MiB", page_tokens=PAGE_TOKENS, **options)
    return Engine(loaded, config, ScheduleConfig())


def answer(engine: Engine, name: str, prompt: list[int]):
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
    engine.submit(GenerationRequest(prompt, params, request_id=name))
    tokens: list[int] = []
    while True:
        for delta in engine.step():
            tokens += delta.token_ids
            if delta.usage is not None:
                return tokens, delta.usage


def state_bytes_by_hand(spec: ModelSpec) -> int:
    """Convolutions and states in float32, in whole cache lines for each layer."""
    total = 0
    for layer in spec.layers:
        if layer.state is not None:
            channels, kernel = layer.state.conv
            numbers = channels * kernel
            if layer.state.recurrent:
                heads, keys, values = layer.state.recurrent
                numbers += heads * keys * values
            total += -(-4 * numbers // 64) * 64
    return total


def test_a_short_request_holds_its_states_and_a_page_of_each_attention_layer(loaded):
    engine = engine_of(loaded)
    params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    engine.submit(GenerationRequest(list(range(3, 15)), params, request_id="short"))
    engine.step()

    memory, row = engine.pool.kv.memory, engine.scheduler.running[0].memory.row

    spec = loaded.spec
    pages = sum(layer.attends for layer in spec.layers)
    heads = spec.heads[-1]
    page_bytes = 4 * PAGE_TOKENS * heads.kv_heads * (heads.key_dim + heads.value_dim)
    assert pages < spec.num_layers
    assert memory.row_bytes(row) == state_bytes_by_hand(spec) + pages * page_bytes


def test_each_turn_of_a_conversation_computes_its_new_tokens_and_less_than_a_block(loaded):
    engine, cold = engine_of(loaded), engine_of(loaded)
    prompt = list(range(3, 60))
    for turn in range(20):
        tokens, usage = answer(engine, f"turn {turn}", prompt)
        known = 0 if not turn else len(prompt) - TURN_TOKENS
        # the newest token of the response was sampled, but not computed
        assert len(prompt) - usage.cached_tokens <= len(prompt) - known + PAGE_TOKENS
        if turn in (1, 7):
            assert answer(cold, f"cold {turn}", prompt)[0] == tokens
        prompt = [*prompt, *tokens, *(3 + (turn * 7 + n) % 90 for n in range(TURN_TOKENS))]


def test_batch_invariance_is_refused(loaded):
    with pytest.raises(UnsoundCombination, match="--batch-invariant"):
        Engine(loaded, kv_config(memory="4MiB"), ScheduleConfig(batch_invariant=True))


def test_an_edited_last_message_computes_itself_and_less_than_a_block(loaded):
    engine = engine_of(loaded)
    prompt = list(range(3, 60))
    tokens, _ = answer(engine, "first", prompt)
    kept = [*prompt, *tokens]
    answer(engine, "second", [*kept, *range(20, 20 + TURN_TOKENS)])

    edited, usage = answer(engine, "edited", [*kept, *range(50, 50 + TURN_TOKENS)])

    assert len(kept) - usage.cached_tokens <= PAGE_TOKENS
    assert answer(engine_of(loaded), "cold", [*kept, *range(50, 50 + TURN_TOKENS)])[0] == edited


def test_states_on_disk_serve_a_prompt_after_a_restart(loaded, tmp_path):
    tier = {"disk_memory": "16MiB", "disk_path": str(tmp_path)}
    prompt = list(range(3, 100))
    first = engine_of(loaded, **tier)
    tokens, _ = answer(first, "before", prompt)
    first.close()

    cached = []
    for turn in range(5):  # a prompt is computed while it is loaded: either can be faster
        again = engine_of(loaded, **tier)
        found, usage = answer(again, f"after {turn}", prompt)
        assert found == tokens
        cached.append(usage.cached_tokens)
        again.close()

    assert max(cached) > 0
