import importlib.util

import pytest

import quire.evals.lm_eval as ours
from quire.errors import ConfigError, RequestError, UnknownName
from quire.evals.lm_eval.__main__ import with_model
from quire.evals.lm_eval.requests import llm_options, log_likelihood, sampling_params
from quire.models.source import find_model
from quire.sampling.outputs import OutputBuilder, OutputDelta, Usage
from quire.sampling.sampler import SampledToken, ScoredToken

HAS_HARNESS = importlib.util.find_spec("lm_eval") is not None
needs_harness = pytest.mark.skipif(not HAS_HARNESS, reason="lm_eval is not installed")
TASKS = ("quire_pairs", "quire_pairs_choice", "quire_perplexity")
TOLERANCE = 1e-3


def test_generation_arguments_become_sampling_options():
    given = {"until": ["\n", ""], "max_gen_toks": 24, "do_sample": False, "temperature": 0.7}

    params = sampling_params(given, 256)

    assert (params.max_tokens, params.stop, params.temperature) == (24, ("\n",), 0.0)
    assert sampling_params({"until": "x"}, 7).stop == ("x",)
    assert sampling_params({}, 7).max_tokens == 7
    sampled = sampling_params({"do_sample": True, "temperature": 0.7, "top_p": 0.9}, 7)
    assert (sampled.temperature, sampled.top_p) == (0.7, 0.9)
    with pytest.raises(UnknownName, match="'num_beams'"):
        sampling_params({"num_beams": 4}, 7)
    with pytest.raises(RequestError, match="max_tokens"):
        sampling_params({"max_gen_toks": -1}, 7)


@pytest.mark.parametrize(
    ("count", "expected"), [(1, (-0.5, True)), (2, (-1.5, True)), (3, (-4.5, False))]
)
def test_log_likelihood_sums_the_last_tokens(count, expected):
    builder = OutputBuilder("r", (1, 2, 3))
    counts = {"prompt_tokens": 3, "completion_tokens": 1, "cached_tokens": 0, "preemptions": 0}
    counts |= {"evicted_tokens": 0, "kv_peak_bytes": 0}
    scored = {
        "logprobs": (SampledToken(4, logprob=-0.5, rank=1),),
        "prompt_logprobs": (None, ScoredToken(2, -3.0, (), 2), ScoredToken(3, -1.0, (), 1)),
    }
    usage = Usage(first_token_s=0.0, total_s=0.0, **counts)
    delta = OutputDelta(
        request_id="r", token_ids=(4,), finish_reason="length", usage=usage, **scored
    )

    assert log_likelihood(builder.add(delta), count) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("--tasks x", "run --model quire --tasks x"),
        ("run --tasks x", "run --model quire --tasks x"),
        *((same, same) for same in ("run --model hf --tasks x", "--model=hf", "ls tasks")),
        *((same, same) for same in ("run --config x.yaml", "--help", "")),
    ],
)
def test_command_uses_quire_unless_a_model_is_named(given, expected):
    assert with_model(given.split()) == expected.split()


@pytest.mark.skipif(HAS_HARNESS, reason="lm_eval is installed")
def test_missing_harness_is_explained():
    with pytest.raises(ConfigError, match=r"needs lm_eval.*quire-llm\[lm-eval\]"):
        _ = ours.QuireLM
    assert not hasattr(ours, "other")


@pytest.fixture(scope="module")
def models():
    """The model classes of Quire and of Hugging Face, with equal limits."""
    from lm_eval.models.huggingface import HFLM

    from quire.evals.lm_eval import QuireLM

    folder = str(find_model("quire-tiny")[0])
    options = {"dtype": "float32", "device": "cuda:0", "max_length": 512}  # the default device
    return {
        "quire": QuireLM(folder, kv_memory="64MiB", **options),
        "hf": HFLM(folder, dtype="float32", device="cpu", max_length=512, batch_size=4),
    }


@pytest.fixture
def local_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))


def requests_of(kind, arguments):
    from lm_eval.api.instance import Instance

    return [Instance(kind, doc={}, arguments=each, idx=i) for i, each in enumerate(arguments)]


@needs_harness
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_tasks_have_the_results_of_the_hugging_face_class(models, local_cache, tmp_path):
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from clients.tasks import write_tasks

    manager = TaskManager(include_path=write_tasks(tmp_path / "tasks"), include_defaults=False)
    found = {
        name: simple_evaluate(model, tasks=[*TASKS], task_manager=manager, bootstrap_iters=0)
        for name, model in models.items()
    }

    numbers = {
        name: {
            (task, metric): value
            for task, values in results["results"].items()
            for metric, value in values.items()
            if isinstance(value, float)
        }
        for name, results in found.items()
    }
    assert {task for task, _ in numbers["quire"]} == set(TASKS)
    assert numbers["quire"] == pytest.approx(numbers["hf"], abs=TOLERANCE, rel=TOLERANCE)
    assert numbers["quire"]["quire_pairs_choice", "acc,none"] > 0.9
    for task in TASKS:
        ours, theirs = ([s["resps"] for s in found[n]["samples"][task]] for n in ("quire", "hf"))
        assert len(ours) == 20
        for our, their in zip(ours, theirs, strict=True):
            assert flat(our) == pytest.approx(flat(their), abs=TOLERANCE, rel=1e-6)


def flat(value):
    """Numbers of nested results; a text by its characters."""
    if isinstance(value, str):
        return list(value.encode())
    if isinstance(value, list | tuple):
        return [number for each in value for number in flat(each)]
    return [float(value)]


@needs_harness
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_single_requests_have_the_results_of_the_hugging_face_class(models):
    text = " ".join(f"line brisk-lamp: <{n}>" for n in range(40))
    pairs = [("", "Once upon"), ("Once upon a", " time"), (text * 3, " there was"), ("a ", "b")]
    whole = [(text * 3,), ("Once upon a time",)]

    ours, theirs = (
        model.loglikelihood(requests_of("loglikelihood", pairs)) for model in models.values()
    )
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]
    scores = [[each for each, _ in of] for of in (ours, theirs)]
    assert scores[0] == pytest.approx(scores[1], abs=TOLERANCE)
    assert len(models["quire"].tok_encode(text * 3)) > 2 * 512  # windows, truncated contexts

    ours, theirs = (
        model.loglikelihood_rolling(requests_of("loglikelihood_rolling", whole))
        for model in models.values()
    )
    assert ours == pytest.approx(theirs, rel=1e-5)


@needs_harness
def test_invalid_model_arguments_are_refused():
    from quire.evals.lm_eval import QuireLM

    with pytest.raises(ConfigError, match="Quote a value with commas"):
        QuireLM("quire-tiny", evict="recent:cap=128", sinks=4)
    with pytest.raises(ConfigError, match="max_length from 2 to"):
        QuireLM("quire-tiny", kv_memory="16MiB", max_length=10**6)
    model = QuireLM("quire-tiny", kv_memory="16MiB", max_length=16)
    with pytest.raises(RequestError, match="lower max_gen_toks"):
        model.generate_until(requests_of("generate_until", [("Once", {"max_gen_toks": 16})]))
    with pytest.raises(RequestError, match="continuation of at most 16 tokens"):
        model.loglikelihood(requests_of("loglikelihood", [("Once", " upon a time" * 20)]))


def test_options_reach_their_configs():
    kv = {"kv_memory": "2MiB", "kv_cache_dtype": "int8", "enable_prefix_caching": False}
    found = llm_options({"dtype": "float32", "max_num_seqs": 4} | kv)

    assert found["dtype"] == "float32"
    assert found["kv"].memory == 2 << 20
    assert found["kv"].codec == "int8"
    assert not found["kv"].prefix_cache.enabled
    assert found["schedule"].max_num_seqs == 4
    assert set(found) == {"dtype", "kv", "schedule"}
    with pytest.raises(UnknownName, match=r"'kv_memry'.*did you mean kv_memory"):
        llm_options({"kv_memry": "2MiB"})
    with pytest.raises(ConfigError, match="kv-memory"):
        llm_options({"kv_memory": "much"})
