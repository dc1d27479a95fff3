"""Options of `quire bench serve`: invalid ones are refused before any request."""

import math

import pytest

from quire.bench.config import BenchServeConfig
from quire.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_prompts": 0}, "--num-prompts of 1 or more, got 0"),
        ({"request_rate": math.nan}, "--request-rate of 1e-09 or more, got nan"),
        ({"burstiness": 0.0}, "--burstiness"),
        ({"max_concurrency": 0}, "--max-concurrency"),
        ({"random_range_ratio": 1.0}, "from 0 to below 1, got 1.0"),
        ({"goodput": ("ttft",)}, "--goodput as ttft:MS"),
        ({"goodput": ("itl:5",)}, "--goodput as ttft:MS"),
        ({"metric_percentiles": "50,x"}, "numbers from 0 to 100"),
        ({"metric_percentiles": "101"}, "numbers from 0 to 100"),
        ({"extra_body": "[1]"}, "JSON object"),
        ({"header": ("Authorization",)}, "NAME=VALUE"),
        ({"dataset_name": "sonnet"}, "one of random"),
        ({"vocab_size": 100, "endpoint": "/v1/chat/completions"}, "chats do not accept"),
        ({"backend": "openai-chat", "endpoint": "/v1/completions"}, "--endpoint of chats"),
        ({"backend": "tgi"}, "one of openai, vllm, openai-chat"),
        ({"ramp_up_start_rps": 1.0}, "need --ramp-up-strategy"),
        ({"ramp_up_strategy": "linear"}, "needs --ramp-up-start-rps"),
        (
            {
                "ramp_up_strategy": "linear",
                "ramp_up_start_rps": 1.0,
                "ramp_up_end_rps": 2.0,
                "request_rate": 5.0,
            },
            "either --request-rate or --ramp-up-strategy",
        ),
    ],
)
def test_an_invalid_option_is_refused_with_its_flag(options, message):
    with pytest.raises(ConfigError, match=message):
        BenchServeConfig(**options)


@pytest.mark.parametrize("url", ["ftp://a", "http://", "http://a:b", "a:8000"])
def test_an_invalid_url_is_refused(url):
    with pytest.raises(ConfigError, match="http or https URL"):
        _ = BenchServeConfig(base_url=url).url


def test_limits_of_several_flags_and_of_one_flag_are_equal():
    one = BenchServeConfig(goodput=("ttft:100,tpot:20",))
    several = BenchServeConfig(goodput=("ttft:100", "tpot:20"))

    assert one.slos() == several.slos() == {"ttft": 100.0, "tpot": 20.0}


@pytest.mark.parametrize(
    ("options", "path", "is_chat"),
    [
        ({}, "/v1/completions", False),
        ({"backend": "vllm"}, "/v1/completions", False),
        ({"backend": "openai-chat"}, "/v1/chat/completions", True),
        ({"endpoint": "/v1/chat/completions"}, "/v1/chat/completions", True),
        ({"backend": "vllm", "endpoint": "/v1/chat/completions"}, "/v1/chat/completions", True),
    ],
)
def test_the_backend_determines_the_path(options, path, is_chat):
    config = BenchServeConfig(**options)

    assert (config.path, config.is_chat) == (path, is_chat)


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
def test_v1_at_the_end_of_the_url_is_removed(end):
    assert BenchServeConfig(base_url=f"http://gpu1:8000/a{end}").url.path == "/a"
