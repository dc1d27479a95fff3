"""Engines with weight offload: logits are bit-equal to those of the same products on the device.

Engines on a CPU multiply packed weights if all of them are on the device. These products add in
another order, so that logits are near those of offloaded layers only; see docs/weights.md.
"""

from dataclasses import replace

import pytest
import torch

from quire.engine.core import Engine
from quire.errors import StorageError, UnsoundCombination
from quire.models import adapter
from quire.models.adapter import TransformersDecoder
from quire.models.weights import weight_bytes
from quire.offload.kv.prefix_splits import PrefixSplits
from quire.offload.split import COPY
from quire.offload.step_log import LAYER, PROJECT
from quire.offload.weights.placement import WithinBudget
from quire.scheduler.schedule_config import ScheduleConfig
from support import zoo
from support.engines import Recorder, answer, largest_difference, load, requests_of
from support.kv_options import kv_config
from support.streamed import DelayedTransfers, load_streamed, poison

NEW_TOKENS = 6
PROMPTS = {
    "a": [5, 9, 2, 7] * 6,
    "b": [3 + i * i % 60 for i in range(35)],
    "c": [3 + i * i % 60 for i in range(20)] + [8, 8, 4] * 3,
    "d": [11, 4],
}
LONG = {
    "a": [5, 9, 2, 7] * 12,
    "b": [3 + i * i % 60 for i in range(70)],
    "c": [3 + i * i % 60 for i in range(40)] + [8, 8, 4] * 7,
    "d": [11, 4] * 9,
}
OFFLOADED = {"memory": "96KiB", "offload_memory": "4MiB", "offload_recompute": "0.6"}
STEPS = {"max_num_batched_tokens": 16, "chunk_tokens": 12}


@pytest.fixture(autouse=True)
def _same_products(monkeypatch):
    """Offloaded layers are not packed: bit-equal logits need plain layers on the device too."""
    monkeypatch.setattr(adapter, "fastest_products", lambda: None)


def engine_of(model, objective="latency", steps=STEPS, **kv):
    options = {"memory": "2MiB", "page_tokens": 4} | kv
    return Engine(model, kv_config(**options), ScheduleConfig(**steps, objective=objective))


def run(model, *, cancel=(), prompts=PROMPTS, **options):
    engine = engine_of(model, **options)
    return engine, answer(engine, requests_of(prompts, NEW_TOKENS), cancel=cancel).logits


RESIDENT: dict[str, dict] = {}


def resident(name: str, **options):
    key = f"{name} {options}"
    if key not in RESIDENT:
        RESIDENT[key] = run(load(name, times=3, impl="transformers"), **options)[1]
    return RESIDENT[key]


def noted_tokens(model) -> list[int]:
    """Tokens of each pass of a layer, noted while the model runs."""
    noted = [0]
    for layer in model.weights.modules:
        layer.register_forward_pre_hook(lambda module, args: noted.append(args[0].shape[-2]))
    return noted


def noted_batches(model) -> list[int]:
    """Numbers of batches of the model's passes, noted while it runs."""
    noted, shared_by = [1], model.weights.shared_by
    model.weights.shared_by = lambda batches: noted.append(batches) or shared_by(batches)
    return noted


def assert_equal(logits, expected):
    assert logits.keys() == expected.keys()
    for request, rows in logits.items():
        for ours, theirs in zip(rows, expected[request], strict=True):
            assert torch.equal(torch.as_tensor(ours), torch.as_tensor(theirs))


def assert_close(logits, expected):
    """Different chunks and batches round differently."""
    assert largest_difference(logits, expected) <= 1e-4


@pytest.mark.parametrize("stay", [0, 2])
@pytest.mark.parametrize("name", ["gpt2", "opt", "llama_mqa", "qwen3", "mixtral"])
def test_logits_equal_those_of_the_same_products_on_the_device(name, stay):
    model = load_streamed(name, stay=stay)
    engine, logits = run(model)

    stats = engine.stats()
    assert_equal(logits, resident(name))
    assert stats.offloaded_weight_bytes >= engine.num_steps * stats.host_weight_bytes > 0
    assert stats.weight_bytes == model.place.device_bytes


@pytest.mark.parametrize("name", ["llama_mqa", "wide_llama_tied"])
def test_logits_are_near_those_of_packed_layers(name, monkeypatch):
    offloaded = run(load_streamed(name, stay=1))[1]
    monkeypatch.undo()

    packed = run(load(name, times=3))[1]

    assert_close(offloaded, packed)


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["latency", "throughput"])
@pytest.mark.parametrize("stay", [0, 1, 3])
@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_every_architecture_under_every_objective(name, stay, objective):
    logits = run(load_streamed(name, stay=stay), objective=objective)[1]
    (assert_equal if objective == "latency" else assert_close)(logits, resident(name))


@pytest.mark.parametrize(
    ("name", "objective"),
    [
        pytest.param(name, objective, marks=[] if i % 2 == j else [pytest.mark.slow])
        for i, name in enumerate(("gpt2", "llama_mqa", "gemma2", "gpt_oss", "phi3_longrope"))
        for j, objective in enumerate(("throughput", "auto"))
    ],
)
def test_batches_of_a_step_share_each_layer(name, objective):
    """Equal logits with fewer passes over the link; no batch is larger."""
    row, column = load_streamed(name), load_streamed(name)
    column.weights.link.copied_s = 1e6  # auto takes it that copies are slow
    tokens = noted_tokens(column)
    by_row, expected = run(row, enable_prefix_caching=False)
    by_column, logits = run(column, objective=objective, enable_prefix_caching=False)

    assert_close(logits, expected)
    assert by_column.num_steps < by_row.num_steps
    assert by_column.num_processed_tokens == by_row.num_processed_tokens
    per_token = [
        engine.stats().offloaded_weight_bytes / engine.num_processed_tokens
        for engine in (by_row, by_column)
    ]
    assert per_token[1] < 0.9 * per_token[0]
    assert 0 < max(tokens) <= STEPS["max_num_batched_tokens"]


def test_requests_run_after_those_that_compute_their_prefix_in_the_same_step():
    """Also among the batches of a step: a row of one token may need KV of an earlier long chunk."""
    begin = [3 + i * i % 60 for i in range(24)]
    options = {"prompts": {"long": begin, "one": [*begin[:12], 7], "two": [*begin[:12], 9]}}
    options["steps"] = {"max_num_batched_tokens": 24, "chunk_tokens": 24}
    engine, logits = run(load_streamed("qwen3"), objective="throughput", **options)
    assert engine.stats().cached_tokens >= 24  # both found the 12 tokens they share
    assert_close(logits, resident("qwen3", **options))


@pytest.mark.parametrize(
    "options",
    [
        *({"codec": "int8"}, {"evict": "average:cap=12,every=4"}, {"memory": "100KiB"}),
        {"memory": "64KiB", "offload_memory": "1MiB"},
        {"enable_prefix_caching": False, "attention": "gathered"},
    ],
    ids=["int8", "average", "preempted", "offloaded_prefix", "gathered"],
)
@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_weight_offload_with_other_options_of_the_engine(options, objective):
    """Logits equal those of an engine with equal options and all weights on the device."""
    if "offload_memory" in options and objective == "throughput":
        objective = "auto"  # steps are one batch
    engine, logits = run(load_streamed("qwen3", stay=1), objective=objective, **options)

    expected = resident("qwen3", **({} if "memory" in options else options))
    assert_close(logits, expected)
    stats = engine.stats()
    assert stats.num_evictions or "evict" not in options
    if "offload_memory" in options:
        assert engine.events.newest(["offloaded"])
    elif "memory" in options:
        assert stats.num_preemptions


@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_cancelled_requests_free_all_pages(objective):
    cancel = [("b", 2), ("c", 3)]
    engine, logits = run(load_streamed("qwen3"), cancel=cancel, objective=objective)

    expected = resident("qwen3")
    assert_close({r: logits[r] for r in ("a", "d")}, {r: expected[r] for r in ("a", "d")})
    assert not engine.has_work


@pytest.mark.parametrize("objective", ["latency", "throughput"])
@pytest.mark.parametrize("at", [0, 3, 8])
def test_a_failed_copy_fails_only_its_step(objective, at):
    """The step can be repeated: its requests are recomputed, with equal logits."""
    worker = DelayedTransfers()
    engine = engine_of(load_streamed("qwen3", transfer_worker=worker), objective)
    worker.fails = {worker.num_copies + at: OSError("the disk is gone")}
    failures, step = [], engine.step

    def step_or_note():
        try:
            return step()
        except StorageError as error:
            failures.append(str(error))
            return []

    engine.step = step_or_note
    logits = answer(engine, requests_of(PROMPTS, NEW_TOKENS)).logits

    assert len(failures) == 1
    assert "could not be transferred: the disk is gone" in failures[0]
    assert_close(logits, resident("qwen3"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_are_loaded_in_the_precision_of_the_product(dtype):
    """A CPU without half-precision instructions multiplies float32 copies: those are loaded."""
    decoder = TransformersDecoder(zoo.build("qwen3", times=3).to(dtype))
    plain = replace(load("qwen3", times=3), decoder=decoder)
    model = zoo.build("qwen3", times=3).to(dtype)
    budget = int(0.8 * weight_bytes(decoder.model))
    place, weights = WithinBudget(budget).place(model, torch.device("cpu"))
    poison(weights.link)
    decoder = TransformersDecoder(model, weights)
    streamed = replace(plain, decoder=decoder, weights=weights, place=place)

    assert weights.place.offloaded_layers
    assert_equal(run(streamed)[1], run(plain)[1])


def test_two_engines_of_one_model_take_turns():
    model = load_streamed("qwen3")
    first, second = (engine_of(model, memory="1MiB") for _ in range(2))
    requests = requests_of(PROMPTS, NEW_TOKENS)
    recorder = second.sampling_step.sampler = Recorder(second.sampling_step.sampler)
    for request in requests:
        second.submit(request)
    logits = answer(first, requests, before_step=lambda _: second.step()).logits
    while second.has_work:
        second.step()

    for found in (logits, recorder.logits):
        assert_equal(found, resident("qwen3"))


def test_memory_for_all_weights_loads_no_layer():
    model = load_streamed("qwen3", stay=99)
    engine, logits = run(model, objective="auto")

    assert model.weights is None
    assert engine.stats().offloaded_weight_bytes == 0
    assert "all" in model.place.text
    assert_equal(logits, resident("qwen3"))
    with pytest.raises(UnsoundCombination, match="set --weights-memory"):
        engine_of(load("qwen3"), "throughput")
    with pytest.raises(UnsoundCombination, match="--weights-memory below the size of the weights"):
        engine_of(model, "throughput")


@pytest.mark.parametrize("objective", ["latency", "throughput"])
@pytest.mark.parametrize("stay", [0, 2])
@pytest.mark.parametrize("name", ["gpt2", "opt", "llama_mha"])
def test_keys_are_recomputed_from_offloaded_weights(name, stay, objective):
    """Logits equal those with all weights and all KV on the device, up to the order of sums."""
    model = load_streamed(name, stay=stay)
    engine, logits = run(model, prompts=LONG, objective=objective, **OFFLOADED)
    assert engine.stats().recomputed_tokens > 0
    assert engine.pool.kv.offload.prefixes.pool.peak_bytes > 0
    assert engine.stats().offloaded_weight_bytes > 0
    assert_close(logits, resident(name, prompts=LONG))


@pytest.mark.parametrize("recompute", ["off", "0.5"])
@pytest.mark.parametrize("name", ["gpt2", "opt", "llama_mha"])
def test_batches_with_offloaded_kv_share_each_layer(name, recompute):
    """Column by column: fewer transfers of weights than row by row, and the same logits."""
    options = OFFLOADED | {"offload_recompute": recompute}
    steps = {"max_num_batched_tokens": 3, "chunk_tokens": 3}
    moved = {}
    for objective in ("latency", "throughput"):
        model = load_streamed(name)
        sizes = noted_batches(model)
        engine, logits = run(model, prompts=LONG, objective=objective, steps=steps, **options)
        moved[objective] = model.weights.num_bytes
        assert (max(sizes) > 1) == (objective == "throughput")
        assert engine.pool.kv.offload.prefixes.pool.peak_bytes > 0
        assert_close(logits, resident(name, prompts=LONG, steps=steps))
    assert moved["throughput"] < moved["latency"]


def test_recompute_prepares_layers_in_any_order():
    """Keys of a layer that is not on the device wait for its weights."""
    models = (load_streamed("opt"), load("opt", times=3, impl="transformers"))
    streamed, plain = (model.decoder for model in models)
    assert streamed.prepare_recomputation() is plain.prepare_recomputation() is None
    inputs = torch.randn(5, plain.spec.hidden_size, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(5)
    for layer in (4, 1, 2, 5, 3):
        found, expected = (d.keys_and_values(layer, inputs, positions) for d in (streamed, plain))
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours, theirs)


def test_auto_split_counts_the_transfer_of_weights(monkeypatch):
    """Weights take the link's time, so more KV is recomputed than with weights on the device."""
    rates = {COPY: (0.0, 2e-6), PROJECT: (0.0, 5e-4), LAYER: (1e-3, 0.0)}
    monkeypatch.setattr("quire.offload.kv.build.measure_offload_speeds", lambda *_, **__: rates)
    monkeypatch.setattr(PrefixSplits, "learn", lambda *_: None)
    shares = {}
    for kind, model in (("streamed", load_streamed("opt")), ("resident", load("opt", times=3))):
        engine, _ = run(model, prompts=LONG, **OFFLOADED | {"offload_recompute": "auto"})
        splits = engine.pool.offload.splits
        shares[kind] = splits.recomputed_tokens / splits.tokens
    assert 0 < shares["resident"] < shares["streamed"]


@pytest.mark.gpu
@pytest.mark.parametrize("objective", ["latency", "throughput"])
@pytest.mark.parametrize("name", ["gpt2", "qwen3", "mixtral"])
def test_logits_on_a_gpu_equal_those_with_weights_on_it(name, objective, monkeypatch):
    expected = run(load(name, "cuda", times=3))[1]
    model = load_streamed(name, stay=1, device="cuda")
    for slot in model.weights.link.slots:
        slot.fill_(0xFF)
    monkeypatch.setattr(torch.cuda, "synchronize", pytest.fail)
    engine, logits = run(model, objective=objective)
    assert largest_difference(logits, expected) <= 1e-4
    assert engine.stats().offloaded_weight_bytes
