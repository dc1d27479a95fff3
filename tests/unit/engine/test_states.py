"""Recurrent states in the KV memory and turns of a conversation; the prefix cache of engines."""

from itertools import count

import pytest
import torch
from torch import Tensor

from models.tiny import build
from quire import LLM, GenerationRequest, SamplingParams, ScheduleConfig
from quire.engine.core import Engine
from quire.errors import ConfigError, RequestError
from quire.layout.model import ModelSpec
from quire.models.loader import load_model
from quire.scheduler.peaks import Need
from support import engines
from support.engines import greedy
from support.kv_options import kv_config

PAGE_TOKENS, NEW_TOKENS, TURN_TOKENS = 16, 9, 11
HYBRIDS = ("qwen3_next", "lfm2")


@pytest.fixture(scope="module", params=HYBRIDS)
def loaded(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    build(request.param).save_pretrained(folder)
    return load_model(folder, dtype="float32", device="cpu")


def engine_of(loaded, schedule: ScheduleConfig | None = None, **options) -> Engine:
    config = kv_config(memory="4MiB", page_tokens=PAGE_TOKENS, **options)
    return Engine(loaded, config, schedule or ScheduleConfig())


def answer(engine: Engine, name: str, prompt: list[int], count: int = NEW_TOKENS, preempt=()):
    """Tokens and usage of one request; `preempt` are options of a preemption after 3 tokens."""
    engine.submit(GenerationRequest(prompt, greedy(count), request_id=name))
    tokens: list[int] = []
    while True:
        if preempt and len(tokens) == 3:
            engine.scheduler.lifecycle.preempt(engine.scheduler.running[0], "test", **dict(preempt))
            preempt = ()
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
    engine.submit(GenerationRequest(list(range(3, 15)), greedy(2)))
    engine.step()

    memory, row = engine.pool.kv.memory, engine.scheduler.running[0].memory.row

    spec = loaded.spec
    pages = sum(layer.attends for layer in spec.layers)
    heads = spec.heads[-1]
    page_bytes = 4 * PAGE_TOKENS * heads.kv_heads * (heads.key_dim + heads.value_dim)
    assert pages < spec.num_layers
    assert memory.row_bytes(row) == state_bytes_by_hand(spec) + pages * page_bytes


TURNS = {  # options of the engine, whether it restarts each turn, and how a turn is preempted
    "alone": ({}, False, ()),
    "asynchronous": ({"schedule": ScheduleConfig(async_scheduling=True)}, False, ()),
    "interval": ({"state_checkpoint_interval": 32}, False, ()),
    "swapped": ({"swap_space": "4MiB"}, False, {"swap_all": True}),
    "recomputed": ({}, False, {"recompute": True}),
    "restarted": ({"disk_memory": "16MiB", "kv_load": "whole"}, True, ()),
    "spilled": ({"cpu_memory": "16MiB", "kv_load": "whole", "few_checkpoints": True}, False, ()),
}


@pytest.mark.parametrize("case", TURNS)
def test_each_turn_of_a_conversation_computes_its_new_tokens_and_less_than_a_block(
    loaded, case, tmp_path
):
    options, restarts, preempt = TURNS[case]
    options = dict(options)
    if "disk_memory" in options:
        options["disk_path"] = str(tmp_path)
    if options.pop("few_checkpoints", False):
        options["state_checkpoint_memory"] = 2 * state_bytes_by_hand(loaded.spec)
    engine, cold = engine_of(loaded, **options), engine_of(loaded, enable_prefix_caching=False)
    prompt = list(range(3, 60))
    for turn in range(20 if case == "alone" else 5):
        tokens, usage = answer(engine, f"turn {turn}", prompt, preempt=preempt)
        known = 0 if not turn else len(prompt) - TURN_TOKENS
        # the newest token of the response was sampled, but not computed
        assert len(prompt) - usage.cached_tokens <= len(prompt) - known + PAGE_TOKENS
        if turn in (1, 4):
            assert answer(cold, f"cold {turn}", prompt)[0] == tokens
        prompt = [*prompt, *tokens, *(3 + (turn * 7 + n) % 90 for n in range(TURN_TOKENS))]
        engine.pool.kv.memory.check()
        if restarts:
            engine.close()
            engine = engine_of(loaded, **options)
    engine.close()


def checkpoints(engine: Engine) -> list[int]:
    prefix = engine.scheduler.sequence_memory.prefix
    return sorted(node.block.end for node in prefix.nodes() if node.statistics)


@pytest.mark.parametrize("chunk_tokens", [7, 64, 512])
def test_states_are_stored_at_each_interval_of_a_prompt_and_a_response(loaded, chunk_tokens):
    schedule = ScheduleConfig(chunk_tokens=chunk_tokens)
    engine = engine_of(loaded, schedule, state_checkpoint_interval=48)
    prompt = [3 + n * 5 % 90 for n in range(120)]
    first, _ = answer(engine, "first", prompt, count=60)

    # each interval, the last whole block of the prompt, and the newest one of the response
    assert checkpoints(engine) == [48, 96, 112, 144, 176]
    changed = [*prompt[:100], *range(20, 40)]
    tokens, usage = answer(engine, "changed", changed)
    assert usage.cached_tokens == 96
    plain = engine_of(loaded, ScheduleConfig(chunk_tokens=1), enable_prefix_caching=False)
    assert answer(plain, "changed", changed)[0] == tokens
    assert answer(plain, "first", prompt, count=60)[0] == first


def test_the_newest_checkpoint_of_a_response_evicts_only_the_one_before_it(loaded):
    """The limit holds two: that of the prompt stays while those of the response change."""
    limit = 2 * state_bytes_by_hand(loaded.spec)
    engine = engine_of(loaded, state_checkpoint_memory=limit)
    prompt = [3 + n * 5 % 90 for n in range(40)]

    answer(engine, "first", prompt, count=60)

    assert checkpoints(engine) == [32, 96]
    assert engine.stats().checkpoint_bytes == limit


def test_checkpoints_have_a_limit_of_bytes_and_lookups_end_at_those_that_remain(loaded):
    one_bytes = state_bytes_by_hand(loaded.spec)
    limit = 3 * one_bytes + one_bytes // 2
    engine = engine_of(loaded, state_checkpoint_interval=16, state_checkpoint_memory=limit)
    prompt = [3 + n * 5 % 90 for n in range(120)]

    answer(engine, "first", prompt, count=2)

    assert checkpoints(engine) == [80, 96, 112]
    assert engine.stats().checkpoint_bytes == 3 * one_bytes
    # the lookup ends at 80 of 96 known tokens, and uses this checkpoint: 96 is the oldest
    _, usage = answer(engine, "shared", [*prompt[:90], *range(20, 40)], count=2)
    assert usage.cached_tokens == 80
    assert checkpoints(engine) == [80, 96, 112]
    _, usage = answer(engine, "evicted", [*prompt[:70], *range(20, 30)], count=2)
    assert usage.cached_tokens == 0
    memory = engine.pool.kv.memory
    assert memory.used_bytes + memory.free_bytes == memory.total_bytes
    assert engine.stats().cached_bytes == memory.used_bytes - sum(
        pool.tail_bytes for pool in memory.pools.values()
    )


OFF = {"state_checkpoint_memory": "1MiB", "enable_prefix_caching": False}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"state_checkpoint_interval": 24}, "multiple of 16 tokens, .* got 24"),
        ({"state_checkpoint_interval": -16}, "0 or more"),
        ({"state_checkpoint_memory": "1KiB"}, "the bytes of one checkpoint, got 1,024 B"),
        (OFF, "memory has no effect: the prefix cache is off"),
    ],
)
def test_options_of_checkpoints_are_checked(loaded, options, message):
    with pytest.raises(ConfigError, match=message):
        engine_of(loaded, **options)


@pytest.mark.parametrize("loaded", [*HYBRIDS, "mamba2"], indirect=True)
def test_completions_and_beams_of_a_prompt_equal_separate_runs(loaded):
    llm = LLM(loaded, kv=kv_config(memory="4MiB", state_checkpoint_interval=16))
    prompt = [3 + n * 5 % 90 for n in range(50)]

    def params(**options) -> SamplingParams:
        return SamplingParams(max_tokens=20, ignore_eos=True, **options)

    # the second request is admitted while copies of the first are still to come
    four = llm.generate([prompt, prompt[:9]], params(temperature=1, seed=5, n=4))[0]
    alone = [llm.generate([prompt], params(temperature=1, seed=5 + i))[0] for i in range(4)]
    assert [one.token_ids for one in four.choices] == [one.token_ids for one in alone]

    beams = params(temperature=0, use_beam_search=True, n=3)
    warm = llm.generate([prompt], beams)[0]
    cold = LLM(loaded, kv=kv_config(memory="4MiB", enable_prefix_caching=False))
    found = cold.generate([prompt], beams)[0]
    assert [one.token_ids for one in warm.choices] == [one.token_ids for one in found.choices]


@pytest.mark.parametrize("at_call", [2, 12])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_step_that_fails_after_it_has_written_states_can_be_repeated(loaded, is_async, at_call):
    """Keys and values may be written twice, a state must not be updated twice."""
    schedule = ScheduleConfig(async_scheduling=is_async, chunk_tokens=16)
    prompts = [list(range(3, 3 + count)) for count in (5, 40, 17, 33)]
    numbers = count(1)

    def fail(*_arguments) -> None:
        if next(numbers) == at_call:
            raise RuntimeError("a bug")

    found = []
    for fails in (False, True):
        engine, tokens = engine_of(loaded, schedule), {}
        for number, prompt in enumerate(prompts):
            engine.submit(GenerationRequest(prompt, greedy(20), request_id=str(number)))
        last = loaded.decoder.model.get_submodule("model.layers")[-1]
        hook = last.register_forward_hook(fail) if fails else None
        num_errors = 0
        while engine.has_work:
            try:
                deltas = engine.step()
            except RuntimeError:
                num_errors += 1
                continue
            for delta in deltas:
                tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
        if hook is not None:
            hook.remove()
        assert num_errors == fails
        engine.check()
        found.append(tokens)
    assert found[0] == found[1]


def stored_states(loaded, codec: str) -> tuple[Tensor, int]:
    """The states after one prompt, all numbers in one vector, and the bytes of their pages."""
    engine = engine_of(loaded, codec=codec)
    engine.submit(GenerationRequest(list(range(3, 60)), greedy(2)))
    engine.step()
    kv, row = engine.pool.kv, engine.scheduler.running[0].memory.row
    found, num_bytes = [], 0
    for group, _ in dict.fromkeys((group, 0) for group, _ in kv.states.values()):
        pages = kv.memory.tables[group.name].row_pages(row)
        num_bytes += len(pages) * group.page_class.page_bytes
        index = torch.from_numpy(pages).long()
        for coded in kv.state_planes[group.name].values():
            decoded = coded.codec.decode([plane[index] for plane in coded.planes])
            found.append(decoded.reshape(-1, decoded.shape[-1]))
    widest = max(rows.shape[1] for rows in found)
    padded = [torch.nn.functional.pad(rows, (0, widest - rows.shape[1])) for rows in found]
    return torch.cat(padded), num_bytes


@pytest.mark.parametrize(("codec", "steps"), [("bfloat16", 1 / 256), ("int8", 1 / 127 / 2)])
def test_states_are_stored_in_less_bytes_with_the_error_of_their_codec(loaded, codec, steps):
    """A prompt in one chunk begins without states: only their encoding differs."""
    exact, exact_bytes = stored_states(loaded, "none")
    found, num_bytes = stored_states(loaded, f"none+states={codec}")

    largest = exact.abs().amax(dim=1, keepdim=True)
    within = steps * (exact.abs() if codec == "bfloat16" else largest)
    # scales are rounded up to float16; convolutions are in bfloat16
    assert ((found - exact).abs() <= 1.002 * within + exact.abs() / 256 + 1e-6).all()
    assert not torch.equal(found, exact)
    assert num_bytes <= 0.51 * exact_bytes + 64


def test_an_edited_last_message_computes_itself_and_less_than_a_block(loaded):
    engine = engine_of(loaded)
    prompt = list(range(3, 60))
    tokens, _ = answer(engine, "first", prompt)
    kept = [*prompt, *tokens]
    answer(engine, "second", [*kept, *range(20, 20 + TURN_TOKENS)])

    edited, usage = answer(engine, "edited", [*kept, *range(50, 50 + TURN_TOKENS)])

    assert len(kept) - usage.cached_tokens <= PAGE_TOKENS
    assert answer(engine_of(loaded), "cold", [*kept, *range(50, 50 + TURN_TOKENS)])[0] == edited


# ---- the prefix cache ----------------------------------------------------------------------------


PAGE = 4
PROMPT = [5, 9, 13, 2, 7, 21, 3, 3, 8, 30, 11, 6, 19]  # 13 tokens: three whole pages and one more
KV = {"memory": "512KiB", "page_tokens": PAGE}
NO_CACHE = {"enable_prefix_caching": False}


@pytest.fixture(scope="module", params=["llama", "gemma3", "gpt2", "gemma3n", "llama4"])
def model(request):
    return engines.load(request.param)


def caching_engine(model, *, kv=None, **schedule):
    return Engine(model, kv_config(**KV | (kv or {})), ScheduleConfig(**schedule))


def generate(engine, prompts, params=None, **options):
    """Submit all prompts at once; return the outputs in order, and their usages."""
    ids = [
        engine.submit(GenerationRequest(prompt, params or engines.greedy(), **options))
        for prompt in prompts
    ]
    tokens, usages = {i: [] for i in ids}, {}
    while engine.has_work:
        for delta in engine.step():
            assert delta.error is None
            tokens[delta.request_id] += delta.token_ids
            if delta.usage is not None:
                usages[delta.request_id] = delta.usage
        engine.check()
    return [tokens[i] for i in ids], [usages[i] for i in ids]


def test_repeated_prompts_prefill_after_their_last_page_unless_nothing_is_cached(model):
    engine = caching_engine(model)
    [first], [before] = generate(engine, [PROMPT])
    processed = engine.num_processed_tokens
    [second], [after] = generate(engine, [PROMPT])

    assert (before.cached_tokens, after.cached_tokens) == (0, 12)
    assert second == first
    assert engine.num_processed_tokens - processed == len(PROMPT) - 12 + engines.NEW_TOKENS - 1

    params = SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=1, ignore_eos=True)
    for engine, second in (
        (caching_engine(model), params),
        (caching_engine(model, kv=NO_CACHE), None),
    ):
        generate(engine, [PROMPT])
        _, [usage] = generate(engine, [PROMPT], second)
        assert usage.cached_tokens == 0
    assert engine.stats().kv_used_bytes == engine.stats().cached_bytes == 0


def test_repeated_prompt_hits_in_a_memory_that_holds_one_request():
    """A block that the first request decoded is published twice: the older copy is evicted."""
    model = engines.load("llama")
    tokens = len(PROMPT) + 6  # the block after the prompt's whole ones is filled in decoding
    fitting = caching_engine(model).scheduler.peaks.fitting_bytes(Need(tokens))
    engine = caching_engine(model, kv={"memory": f"{fitting}B"})

    found = [generate(engine, [PROMPT], engines.greedy(7)) for _ in range(4)]

    assert [usage.cached_tokens for _, [usage] in found] == [0, 12, 12, 12]
    assert all(outputs == found[0][0] for outputs, _ in found)
    assert engine.stats().num_preemptions == 0


def test_requests_share_prefixes_and_output_tokens_are_cached_too(model):
    prompts = [[*PROMPT, i] for i in range(3)]
    alone, _ = generate(caching_engine(model, kv=NO_CACHE), prompts)
    engine = caching_engine(model)

    outputs, usages = generate(engine, prompts)

    assert [usage.cached_tokens for usage in usages] == [0, 12, 12]
    assert outputs == alone
    assert engine.num_steps == engines.NEW_TOKENS
    in_chunks = caching_engine(model, chunk_tokens=4, max_num_batched_tokens=8)
    outputs, usages = generate(in_chunks, [PROMPT, PROMPT])  # up to the computed tokens
    assert outputs[0] == outputs[1]
    assert usages[1].cached_tokens == 4

    engine = caching_engine(model)
    [output], _ = generate(engine, [PROMPT])
    whole = [*PROMPT, *output, 4]
    found = (len(PROMPT) + len(output) - 1) // PAGE * PAGE  # the last token has no KV

    [after], [usage] = generate(engine, [whole])

    assert usage.cached_tokens == found
    [alone], _ = generate(caching_engine(model, kv=NO_CACHE), [whole])
    assert after == alone


def test_only_a_public_prefix_is_shared_across_tenants_or_salts():
    engine = caching_engine(engines.load("llama"))
    generate(engine, [PROMPT], tenant="a")
    others = {"tenant": "b"}, {}, {"tenant": "a", "cache_salt": "x"}, {"tenant": "a"}

    found = [generate(engine, [PROMPT], **options)[1][0].cached_tokens for options in others]

    assert found == [0, 0, 0, 12]
    for salt in ("a\nb", "a\x00", "x" * 129):
        with pytest.raises(RequestError, match="salt"):
            engine.submit(GenerationRequest(PROMPT, cache_salt=salt))
    public = caching_engine(engines.load("llama"))
    public.share_publicly(PROMPT[:9])
    generate(public, [PROMPT], tenant="a")
    _, [usage] = generate(public, [PROMPT], tenant="b")
    assert usage.cached_tokens == 8


def test_blocks_after_evictions_and_to_be_written_are_not_cached_or_evicted():
    """A cap of 8 tokens per lane: only blocks from before the first eviction are cached."""
    model = engines.load("llama")
    kv = {"evict": "recent:cap=8,every=2"}
    engine = caching_engine(model, kv=kv)
    [first], _ = generate(engine, [PROMPT])
    [second], [usage] = generate(engine, [PROMPT])
    [other], _ = generate(caching_engine(model, kv=kv | NO_CACHE), [PROMPT])
    assert usage.cached_tokens == 8
    assert first == second == other

    # the second request matches 8 tokens, its cap, that the first computes in this step
    model = engines.load("llama")
    evict = "recent:cap=8,every=2,sinks=2"
    prompts = [PROMPT, [*PROMPT[:8], 4, 4, 4, 4]]
    alone = [
        generate(caching_engine(model, kv={"evict": evict}), [prompt])[0][0] for prompt in prompts
    ]

    outputs, usages = generate(caching_engine(model, kv={"evict": evict}), prompts)

    assert usages[1].cached_tokens == 8
    assert outputs == alone


def test_cached_prefixes_are_evicted_before_a_request_is_preempted():
    model = engines.load("llama")
    engine = engines.engine_for(model, room=1.0, longest=24, page_tokens=PAGE)
    for start in range(6):
        prompt = [start + 2] * 16
        [output], _ = generate(engine, [prompt])
        [alone], _ = generate(caching_engine(model, kv=NO_CACHE), [prompt])
        assert output == alone
    assert engine.stats().num_preemptions == 0


def test_kv_events_of_two_requests_with_a_shared_prefix():
    """13 tokens in chunks of 8: two chunks, then 7 of 8 output tokens; 5 blocks of 4 in 20."""
    engine = caching_engine(engines.load("llama"), chunk_tokens=8)
    generate(engine, [PROMPT])
    generate(engine, [PROMPT])
    events = {}
    for event in engine.events.newest():
        events.setdefault(event.kind, []).append(event.data)

    assert [data["tokens"] for data in events["chunk"]] == [8, 5, 1]
    assert sum(data["blocks"] for data in events["prefix_cached"]) == 5
    assert [data["tokens"] for data in events["shared"]] == [12]
    assert [data["reason"] for data in events["freed"]] == ["finished", "finished"]
    assert sum(data["kv_bytes"] for data in events["prefix_cached"]) == engine.stats().cached_bytes
