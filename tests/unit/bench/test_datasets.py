"""Data sets of `quire bench serve`: lengths, common prefixes and order are as the options say."""

import itertools
import json
from collections import Counter

import pytest

from quire.bench.arrivals import arrival_times
from quire.bench.config import BenchServeConfig
from quire.bench.datasets.registry import DATASETS, make_requests
from quire.bench.prompts import PromptMaker, open_tokenizer
from quire.errors import ConfigError

IDS = PromptMaker(None, vocab_size=1000)


def requests(maker=IDS, **options):
    return make_requests(BenchServeConfig(**options), maker)


def write(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return str(path)


def test_random_prompts_have_exact_lengths_and_a_common_prefix():
    found = requests(num_prompts=9, random_input_len=20, random_prefix_len=5, random_output_len=7)

    assert [one.prompt.tokens for one in found] == [25] * 9
    assert {one.output_tokens for one in found} == {7}
    assert len({tuple(one.prompt.content[:5]) for one in found}) == 1
    assert len({tuple(one.prompt.content[5:]) for one in found}) == 9


def test_lengths_vary_within_the_range_ratio():
    found = requests(num_prompts=200, random_input_len=100, random_range_ratio=0.5)

    lengths = {one.prompt.tokens for one in found}
    assert len(lengths) > 20
    assert min(lengths) >= 50
    assert max(lengths) <= 150


@pytest.mark.parametrize("name", ["random", "prefix_repetition"])
def test_the_same_seed_gives_the_same_requests(name):
    options = {"dataset_name": name, "num_prompts": 12}

    assert requests(**options) == requests(**options)
    assert requests(**options) != requests(**options, seed=1)


def test_prefixes_are_repeated_equally_often():
    found = requests(
        dataset_name="prefix_repetition",
        num_prompts=22,
        prefix_repetition_num_prefixes=4,
        prefix_repetition_prefix_len=8,
        prefix_repetition_suffix_len=3,
    )

    counts = Counter(tuple(one.prompt.content[:8]) for one in found)
    assert sorted(counts.values()) == [5, 5, 6, 6]
    assert {one.prompt.tokens for one in found} == {11}


def test_text_prompts_of_a_tokenizer_have_nearly_the_wanted_length():
    tokenizer = open_tokenizer("quire-tiny")
    found = requests(PromptMaker(tokenizer), num_prompts=20, random_input_len=50)

    for one in found:
        assert one.prompt.tokens == len(tokenizer.encode(one.prompt.content))
        assert 45 <= one.prompt.tokens <= 55


def test_hash_ids_of_a_trace_give_common_prefixes_and_its_times(tmp_path):
    line = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}
    trace = write(
        tmp_path / "trace.jsonl",
        line,
        line | {"timestamp": 2000, "hash_ids": [1, 3]},
        line | {"timestamp": 3000, "input_length": 700, "output_length": 0},
    )
    options = {"dataset_name": "timed_trace", "dataset_path": trace, "time_scale": 0.5}
    config = BenchServeConfig(**options)

    first, second, third = found = make_requests(config, IDS)

    assert first.prompt.content[:512] == second.prompt.content[:512]
    assert first.prompt.content[512:] != second.prompt.content[512:]
    assert third.prompt.content[:600] == first.prompt.content
    assert [one.output_tokens for one in found] == [5, 5, 1]
    assert arrival_times(found, config) == [0.0, 1.0, 1.5]


def test_sharegpt_takes_the_first_two_turns_of_suitable_conversations(tmp_path):
    def conversation(*texts):
        return {"conversations": [{"from": "human", "value": text} for text in texts]}

    path = tmp_path / "chats.json"
    chats = [conversation("a" * 40, "b" * 80, "c"), conversation("hi", "b"), conversation("a" * 40)]
    path.write_text(json.dumps(chats), encoding="utf-8")
    options = {"dataset_name": "sharegpt", "dataset_path": str(path)}

    [one] = requests(**options)
    [fixed] = requests(**options, sharegpt_output_len=3)

    assert (one.prompt.content, one.output_tokens) == ("a" * 40, 20)
    assert fixed.output_tokens == 3


def test_custom_lines_keep_their_order_and_own_output_lengths(tmp_path):
    path = write(
        tmp_path / "own.jsonl",
        {"prompt": "one", "output_tokens": 4},
        {"prompt": [1, 2, 3], "output_tokens": 5},
    )
    options = {"dataset_name": "custom", "dataset_path": path}

    found = requests(**options, custom_output_len=-1)

    assert [one.prompt.content for one in found] == ["one", [1, 2, 3]]
    assert [one.output_tokens for one in found] == [4, 5]
    assert {one.output_tokens for one in requests(**options)} == {256}


@pytest.mark.parametrize("name", sorted(set(DATASETS) - {"random", "prefix_repetition"}))
def test_a_missing_file_is_refused_by_name(name, tmp_path):
    with pytest.raises(ConfigError, match=f"{name} needs --dataset-path"):
        requests(dataset_name=name)
    with pytest.raises(ConfigError, match="nowhere"):
        requests(dataset_name=name, dataset_path=str(tmp_path / "nowhere"))


@pytest.mark.parametrize(("burstiness", "spread"), [(0.2, 2.2), (1.0, 1.0), (25.0, 0.2)])
def test_arrivals_have_the_rate_and_the_spread_of_their_gamma_distribution(burstiness, spread):
    config = BenchServeConfig(num_prompts=4000, request_rate=50.0, burstiness=burstiness)

    times = arrival_times(requests(num_prompts=4000, random_input_len=1), config)

    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert times[-1] == pytest.approx(80.0)
    assert deviation / mean == pytest.approx(spread, rel=0.15)


def test_a_rising_rate_shortens_the_times_between_arrivals():
    config = BenchServeConfig(
        num_prompts=500,
        ramp_up_strategy="exponential",
        ramp_up_start_rps=1.0,
        ramp_up_end_rps=100.0,
        burstiness=1000.0,
    )

    times = arrival_times(requests(num_prompts=500, random_input_len=1), config)

    assert times[100] - times[0] > 10 * (times[-1] - times[-101])
