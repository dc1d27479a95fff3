import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from quire import LLM, KVConfig, SamplingParams, ScheduleConfig
from quire.errors import ConfigError, EngineDead, RankFailed, UnsupportedModel
from quire.models.loader import load_model
from support import zoo

pytestmark = pytest.mark.slow

TEXTS = [
    *(f"<|doc|>Once upon a time there was a small {thing}" for thing in ("house", "dog")),
    "<|doc|>The number of pages that a sequence holds",
    "<|doc|>1 2 3 4 5 6 7 8 9 10 11 12 13 14",
]
GREEDY = SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True)
EVICTING = (
    *("full", "h2o:cap=32,every=8,recent=8", "snapkv:cap=32,every=8,window=8"),
    *("kvcrush:cap=32,every=8", "recent:cap=32,every=8"),
)


def open_llm(model: str | Path = "quire-tiny", ranks: int = 2, **options: object) -> LLM:
    kv = KVConfig(**({"memory": (32 << 20) // ranks, "page_tokens": 8} | options))
    schedule = ScheduleConfig(max_num_batched_tokens=64)
    of_ranks = {"tensor_parallel_size": ranks, "tensor_parallel_timeout": 20.0}
    return LLM(model, dtype="float32", device="cpu", kv=kv, schedule=schedule, **of_ranks)


def tokens_of(llm: LLM, prompts: Sequence[str | list[int]], **options: object) -> list[list[int]]:
    outputs = llm.generate(prompts, GREEDY, **options)
    return [list(output.token_ids) for output in outputs]


def children() -> set[int]:
    own, found = os.getpid(), set()
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, parent = status.read_text().rsplit(") ", 1)
            command = (status.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if int(parent.split()[1]) == own and b"quire.engine.rank_process" in command:
            found.add(int(name.split()[0]))
    return found


@pytest.fixture
def pair() -> Iterator[LLM]:
    llm = open_llm()
    yield llm
    llm.close()
    assert not children()


def test_rules_and_codecs_give_the_tokens_of_one_rank() -> None:
    for codec in ("auto", "int8", "int4"):
        alone = open_llm(ranks=1, codec=codec, evict_allow="all")
        pair = open_llm(codec=codec, evict_allow="all")
        for evict in EVICTING:
            found, expected = (tokens_of(llm, TEXTS, evict=evict) for llm in (pair, alone))
            assert found == expected, (codec, evict)
        assert pair.stats().cached_tokens > 0
        pair.close()
        alone.close()
    assert not children()


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_random_models_give_the_tokens_of_one_rank(architecture: str, tmp_path: Path) -> None:
    folder = zoo.save(architecture, tmp_path)
    prompts = [list(range(3, 3 + length)) for length in (9, 40, 25)]
    alone, pair = open_llm(folder, ranks=1), open_llm(folder)

    assert tokens_of(pair, prompts) == tokens_of(alone, prompts)

    pair.close()
    alone.close()


def test_preempted_requests_give_the_tokens_of_one_rank() -> None:
    alone = open_llm(ranks=1, memory=1200 << 10)
    pair = open_llm(memory=600 << 10)

    assert tokens_of(pair, TEXTS * 4) == tokens_of(alone, TEXTS * 4)
    assert pair.stats().num_preemptions > 0

    pair.close()
    alone.close()


def test_close_ends_the_other_ranks(pair: LLM) -> None:
    assert len(children()) == 1
    list(pair.stream(TEXTS[0], GREEDY))

    pair.close()

    assert not children()
    with pytest.raises(EngineDead):
        pair.generate(TEXTS[0])


def test_killed_rank_ends_the_engine(pair: LLM) -> None:
    tokens_of(pair, TEXTS[:1])
    [rank] = children()
    started_s = time.monotonic()
    os.kill(rank, signal.SIGKILL)

    with pytest.raises(RankFailed, match=rf"rank 1 \(process {rank}\) ended by signal 9"):
        tokens_of(pair, TEXTS)

    assert time.monotonic() - started_s < 10.0
    assert not children()
    with pytest.raises(EngineDead, match="ended by signal 9"):
        tokens_of(pair, TEXTS)


def test_rank_killed_within_a_step_ends_the_engine(pair: LLM) -> None:
    [rank] = children()
    stream = pair.stream(TEXTS[0], SamplingParams(max_tokens=2000, ignore_eos=True))
    next(stream)
    threading.Timer(0.2, os.kill, (rank, signal.SIGKILL)).start()
    with pytest.raises(RankFailed, match="rank 1"):
        list(stream)


def test_stopped_rank_ends_the_engine_after_the_timeout() -> None:
    llm = LLM("quire-tiny", device="cpu", tensor_parallel_size=2, tensor_parallel_timeout=2.0)
    [rank] = children()
    os.kill(rank, signal.SIGSTOP)
    try:
        with pytest.raises(RankFailed, match="did not respond within 2 s"):
            tokens_of(llm, TEXTS)
    finally:
        llm.close()
    assert not children()


def test_errors_at_load_are_those_of_one_rank(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="tensor_parallel_size=3"):
        open_llm(ranks=3)
    with pytest.raises(UnsupportedModel, match="plan"):
        open_llm(zoo.save("gpt2", tmp_path))
    with pytest.raises(ConfigError, match="exceeds"):
        open_llm(memory=1 << 50)
    for size in (0, -1, 65):
        with pytest.raises(ConfigError, match="from 1 to 64"):
            LLM("quire-tiny", tensor_parallel_size=size)
    with pytest.raises(ConfigError, match="folder or name"):
        LLM(load_model("quire-tiny", device="cpu", verify=False), tensor_parallel_size=2)
    assert not children()
