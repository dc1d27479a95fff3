"""Values of `KVConfig`, sampling options and messages of a chat are checked once, by field."""

import pickle
from dataclasses import dataclass, replace

import numpy as np
import pytest

from quire import KVConfig, OffloadConfig, PrefixCacheConfig
from quire.config.chat_messages import MAX_EXTRA_FIELDS, read_messages
from quire.config.sampling_params import SamplingParams
from quire.config.store_url import parse_folder, parse_store_url
from quire.errors import ConfigError, RequestError, UnknownName
from quire.layout.codec_names import codec_spec
from quire.layout.options import option_values
from quire.serve.config import ServerConfig
from support.kv_options import kv_config


def test_sizes_are_bytes_fractions_are_numbers_and_auto_is_none():
    offload = OffloadConfig(kv_memory=7, recompute="0.5", cpu_attention="off")
    config = KVConfig(memory="3MiB", swap_space="1KiB", offload=offload, scratch="1kB")

    assert (config.memory, config.swap_space, config.offload.kv_memory) == (3 << 20, 1024, 7)
    assert (config.scratch, config.prefix_cache.disk_memory) == (1000, 0)
    assert (offload.recompute, offload.cpu_attention) == (0.5, 0.0)
    assert OffloadConfig(recompute=0.25).recompute == 0.25
    assert KVConfig().memory is None
    assert KVConfig().prefix_cache == PrefixCacheConfig(enabled=True, disk_memory=0)
    assert ServerConfig(max_body="1MiB").max_body == 1 << 20
    unset = OffloadConfig()
    assert unset.recompute is unset.cpu_attention is unset.activation_codec is None


def test_parsed_values_are_json_values_without_passwords_and_can_be_replaced():
    offload = OffloadConfig(recompute="0.5", activation_codec="int8")
    config = KVConfig(memory="3MiB", offload=offload, swap_space="1KiB")
    assert replace(offload, recompute=None).activation_codec == codec_spec("int8")
    assert replace(config, codec="int8", memory=config.memory).memory == config.memory
    assert replace(config) == config
    values = option_values(KVConfig(memory="1KiB", offload=OffloadConfig(activation_codec="int8")))
    assert (values["memory"], values["offload"]["activation_codec"]) == (1024, "int8")
    assert values["offload"]["recompute"] is None
    assert values["prefix_cache"]["enabled"] is True

    config = PrefixCacheConfig(remote="redis://user:secret@host")
    assert option_values(config)["remote"] == "redis://host:6379/0"
    assert "secret" not in repr(config)
    assert option_values(PrefixCacheConfig())["remote"] is None


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"memory": "lots"}, ConfigError, "--kv-memory: 'lots' is not a size: .*, or auto"),
        ({"memory": 1.5}, ConfigError, "--kv-memory: 1.5 is not a size"),
        ({"swap_space": "some"}, ConfigError, "--swap-space: 'some' is not a size: .*, or auto"),
        ({"scratch": True}, ConfigError, "--scratch: True is not a size"),
        ({"offload_recompute": "2"}, ConfigError, "--kv-offload-recompute: expected auto, off or"),
        ({"offload_recompute": True}, ConfigError, "a fraction from 0 to 1, got True"),
        ({"offload_cpu_attention": "nan"}, ConfigError, "got 'nan'"),
        ({"offload_activation_codec": "int9"}, UnknownName, "unknown codec 'int9'"),
        ({"offload_activation_codec": "int4_page"}, ConfigError, "encodes single tokens"),
        ({"offload_activation_codec": 8}, ConfigError, "--kv-offload-activation-codec: expected"),
    ],
)
def test_invalid_value_is_refused_with_its_option_name(options, error, message):
    with pytest.raises(error, match=message):
        kv_config(**options)


# ---- URLs of shared stores -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("redis://host", "redis://host:6379/0"),
        ("redis://host:1/3", "redis://host:1/3"),
        ("valkey://user:secret@host:1", "redis://host:1/0"),
        ("valkeys://[::1]:7", "rediss://[::1]:7/0"),
        ("rediss://host?ssl_ca_certs=/x", "rediss://host:6379/0"),
        ("unix:///run/redis.sock?db=2", "unix:///run/redis.sock"),
        ("unix://:secret@/run/redis.sock", "unix:///run/redis.sock"),
        ("file:///var/lib/kv%20store", "file:///var/lib/kv store"),
    ],
)
def test_url_is_parsed_and_shown_without_its_password(text, shown):
    url = parse_store_url(text)
    assert str(url) == shown
    assert "secret" not in f"{url} {url!r}"
    assert parse_store_url(url) is url


def test_login_database_and_files():
    url = parse_store_url("rediss://a%40b:p%2Fw@host/5?ssl_certfile=c&ssl_ca_certs=a")
    assert (url.username, url.password, url.database) == ("a@b", "p/w", 5)
    assert url.files == (("ssl_ca_certs", "a"), ("ssl_certfile", "c"))
    assert parse_store_url("unix:///x?db=3").database == 3
    assert (parse_folder("x/y"), parse_folder("file:///x/y")) == ("x/y", "/x/y")
    with pytest.raises(ConfigError, match="use --remote-kv for it"):
        parse_folder("redis://host")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("10.0.0.7:8700", "expected redis://HOST:PORT"),
        ("kv://10.0.0.7:8700", r"expected redis://HOST:PORT, .*got 'kv://10.0.0.7:8700'"),
        ("nowhere", r"expected redis://HOST:PORT, .*got 'nowhere'"),
        ("http://:secret@host", r"expected redis://HOST:PORT, .*got 'http://host'"),
        ("redis://:secret@host:x", r"got 'redis://host:x'"),
        ("redis://:secret@", "expected a host"),
        ("redis://host/x", "expected redis://HOST:PORT"),
        ("redis://host?ttl=3", r"after '\?', got ttl"),
        ("redis://host?ssl_ca_certs=x", r"got ssl_ca_certs"),
        ("unix://relative", "expected an absolute path"),
        ("file://host/folder", "expected an absolute path"),
        ("file:///", "expected an absolute path"),
        (7, "got 7"),
    ],
)
def test_other_texts_are_refused_without_the_password(text, says):
    with pytest.raises(ConfigError, match=says) as raised:
        parse_store_url(text)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("config", "options", "says"),
    [
        (KVConfig, {"offload": {"kv_memory": 1}}, "expected offload to be .*Config, got"),
        (KVConfig, {"prefix_cache": False}, "expected prefix_cache to be .*Config, got"),
        (OffloadConfig, {"recompute": 0.5, "cpu_attention": 0.6}, "of at most 1, got"),
        (PrefixCacheConfig, {"remote_ttl_s": -1.0}, "--remote-kv-ttl of 0 or more"),
        (PrefixCacheConfig, {"remote_ttl_s": float("nan")}, "--remote-kv-ttl of 0 or more"),
        (PrefixCacheConfig, {"remote_timeout_s": 0.0}, "--remote-kv-timeout above 0"),
        (PrefixCacheConfig, {"remote_timeout_s": 100.0}, "up to 60 seconds"),
        (PrefixCacheConfig, {"remote": "a:1"}, "--remote-kv: expected redis://HOST:PORT"),
        (PrefixCacheConfig, {"write": "x"}, "expected kv-write to be one of back, through"),
    ],
)
def test_invalid_options_and_nested_configs_are_refused(config, options, says):
    with pytest.raises(ConfigError, match=says):
        config(**options)


# ---- sampling options ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Defaults:
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


NAN, INF = float("nan"), float("inf")
WRONG = {
    "max_tokens": [-1, 2.0, True, None, 0],
    "temperature": [NAN, INF, -0.1, "hot", False, 1e-320, 1e-40, 1e300],
    "top_k": [-2, 1.5],
    "top_p": [0.0, 1.01],
    "min_p": [-0.1, 2, 1e-300],
    "repetition_penalty": [0.0, INF, 1e-320, 1e-7, 1e7],
    "length_penalty": [1e5, -1e5],
    "presence_penalty": [2.1, None],
    "frequency_penalty": [-2.1],
    "logit_bias": [{1: 1e-320}, {1: 101.0}, {-1: 1.0}, {"1": 1.0}, [1]],
    "allowed_token_ids": [[], [1.0], "12"],
    "bad_token_ids": [[[]], [1]],
    "stop": ["", ["a", ""], [1], 5],
    "stop_token_ids": [5, [-1]],
    "ignore_eos": [1],
    "logprobs": [-1],
    "prompt_logprobs": ["all"],
    "seed": [2**64, 0.5],
}


def test_errors_name_values_which_are_python_tuples_and_hash_equal():
    for name, value in [(name, value) for name, values in WRONG.items() for value in values]:
        with pytest.raises(RequestError, match=name):
            SamplingParams(**{name: value})
    with pytest.raises(RequestError, match="min_tokens"):
        SamplingParams(max_tokens=4, min_tokens=5)
    with pytest.raises(RequestError) as refusal:
        SamplingParams(top_p=1.5)
    assert str(refusal.value) == "top_p must be a finite number in (0, 1], got 1.5"

    bias = {1: 2.0}
    lists = {"stop_token_ids": [3, 4], "bad_token_ids": [[1], [2, 3]], "allowed_token_ids": {7}}
    given = {"max_tokens": np.int64(8), "temperature": np.float32(0.5), "top_p": 1}
    params = SamplingParams(stop="END", logit_bias=bias, **lists, **given)
    bias[1] = -2.0

    assert (params.stop, params.stop_token_ids) == (("END",), (3, 4))
    assert (params.bad_token_ids, params.allowed_token_ids) == (((1,), (2, 3)), (7,))
    numbers = (params.max_tokens, params.temperature, params.top_p)
    assert [type(number) for number in numbers] == [int, float, float]
    assert params.logit_bias == {1: 2.0}

    first = SamplingParams(logit_bias={1: 2.0}, stop="x")
    assert {first: "seen"}[SamplingParams(logit_bias={1: 2}, stop=["x"])] == "seen"
    assert pickle.loads(pickle.dumps(first)) == first
    assert SamplingParams(max_tokens=0, prompt_logprobs=0).max_tokens == 0


@pytest.mark.parametrize(
    ("model", "given", "used", "text"),
    [
        ({}, {}, (0.2, 0.9), "temperature 0.2 (Quire's default), top_p 0.9 (Quire's default)"),
        ({"top_p": 0.8}, {}, (0.2, 0.8), "0.2 (Quire's default), top_p 0.8 (the model's)"),
        ({}, {"top_p": 0.5}, (0.2, 0.5), "temperature 0.2 (Quire's default), top_p 0.5"),
        ({}, {"temperature": 1.0}, (1.0, 1.0), "temperature 1"),
        ({}, {"temperature": 0.0, "top_p": 0.5}, (0.0, 0.5), "temperature 0, top_p 0.5"),
        ({"temperature": 0.0}, {}, (0.0, 1.0), "temperature 0 (the model's)"),
        ({"temperature": 0.6, "top_p": 0.95}, {}, (0.6, 0.95), "top_p 0.95 (the model's)"),
        ({}, {"use_beam_search": True, "beam_width": 2}, (0.0, 1.0), "temperature 0"),
    ],
)
def test_response_has_a_temperature_if_the_model_names_none(model, given, used, text):
    defaults, params = Defaults(**model), SamplingParams(**given)
    resolved = params.with_response_defaults(defaults).resolve(defaults)
    assert (resolved.temperature, resolved.top_p) == used
    assert params.response_text(defaults, ("temperature", "top_p")).endswith(text)


MODEL = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.1, "repetition_penalty": 1.05}
NEUTRAL = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


@pytest.mark.parametrize(
    ("given", "model", "expected"),
    [
        ({"top_p": 0.5, "max_tokens": 9}, MODEL, MODEL | {"top_p": 0.5, "max_tokens": 9}),
        ({}, {}, NEUTRAL),
        # an explicit zero overrides the model's default
        ({"temperature": 0, "top_k": 0}, {"temperature": 1.0, "top_k": 50}, NEUTRAL),
    ],
)
def test_unset_options_are_resolved_from_the_model_defaults(given, model, expected):
    resolved = SamplingParams(**given).resolve(Defaults(**model))
    assert resolved == SamplingParams(**expected)
    assert resolved.greedy == (resolved.temperature == 0)
    assert resolved.edits_logits == (resolved.repetition_penalty != 1)


@pytest.mark.parametrize("temperature", [None, 0, 1e-6])
def test_unset_or_near_zero_temperature_is_greedy(temperature):
    assert SamplingParams(temperature=temperature).greedy
    assert not SamplingParams(temperature=1e-4).greedy


@pytest.mark.parametrize(
    "option",
    [
        *({"allowed_token_ids": [1]}, {"bad_token_ids": [[1]]}, {"logit_bias": {1: 1.0}}),
        *({"repetition_penalty": 1.1}, {"presence_penalty": 0.1}, {"frequency_penalty": -0.1}),
    ],
    ids=str,
)
def test_masks_biases_and_penalties_edit_the_logits(option):
    assert SamplingParams(**option).edits_logits


@pytest.mark.parametrize(
    "options",
    [
        *({"allowed_token_ids": [9, 10]}, {"bad_token_ids": [[1], [2, 10]]}),
        *({"logit_bias": {10: 1.0}}, {"stop_token_ids": [10]}),
        *({"logprobs": 11}, {"prompt_logprobs": 11}),
    ],
    ids=str,
)
def test_token_id_outside_the_vocabulary_is_refused(options):
    params = SamplingParams(**options)
    params.validate_for(11)
    with pytest.raises(RequestError, match=next(iter(options))):
        params.validate_for(10)


# ---- messages of a chat --------------------------------------------------------------------------


USER = {"role": "user", "content": "Hi"}
TEXTS = [{"type": "text", "text": text} for text in "ab"]
PARTS = [TEXTS[0], TEXTS[1] | {"cache_control": {}}]
EMPTY = {"role": "assistant", "content": ""}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "4"}


def call_of(arguments):
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (USER, USER),
        (USER | {"name": "ann", "refusal": None, "x": [None]}, USER | {"name": "ann", "x": [None]}),
        (USER | {"tool_calls": []}, USER),
        (USER | {"content": PARTS}, USER | {"content": TEXTS}),
        ({"role": "assistant", "content": None, "tool_calls": None}, EMPTY),
        ({"role": "assistant"}, EMPTY),
        (RESULT, RESULT),
    ],
)
def test_message_is_read(message, expected):
    [found] = read_messages([message])
    assert found == expected
    assert read_messages([found]) == [found]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        *(('{"a": [1]}', {"a": [1]}), ({"a": 1}, {"a": 1}), ("", {}), (None, {})),
        ('{"a": "cut o', '{"a": "cut o'),  # an output that reached its maximum length
        ("[1]", "[1]"),
        ("{" * 100_000, "{" * 100_000),
    ],
)
def test_arguments_of_calls_are_objects_if_they_are_whole(arguments, expected):
    calls = [call_of("{}"), call_of(arguments)]
    [found] = read_messages([{"role": "assistant", "tool_calls": calls}])
    assert [c["function"]["arguments"] for c in found["tool_calls"]] == [{}, expected]
    assert read_messages([found]) == [found]


@pytest.mark.parametrize(
    ("message", "param", "text"),
    [
        (5, "", "an object with role"),
        ({"content": "a"}, ".role", "a role"),
        ({"role": 1, "content": "a"}, ".role", "got 1"),
        ({"role": "user"}, ".content", "got none"),
        ({"role": "system", "content": None}, ".content", "got none"),
        ({"role": "user", "content": 5}, ".content", "got 5"),
        ({"role": "user", "content": [5]}, ".content.0", "got 5"),
        ({"role": "user", "content": [{"type": "text"}]}, ".content.0", '"text"'),
        ({"role": "user", "content": [{"type": "image_url"}]}, ".content.0.type", "got image_url"),
        (USER | {"contnet": "a"}, ".contnet", "`content`"),
        ({"role": "assistant", "Con-tent": "a"}, ".Con-tent", "`content`"),
        ({"role": "assistant", "tool_calls": {"a": 1}}, ".tool_calls", "a list"),
        ({"role": "assistant", "tool_calls": [1]}, ".tool_calls.0", "got 1"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, ".tool_calls.0", '"name"'),
        (EMPTY | {"tool_calls": [call_of(5)]}, ".tool_calls.0.function.arguments", "got 5"),
    ],
)
def test_wrong_message_is_refused_with_its_field(message, param, text):
    with pytest.raises(RequestError) as refused:
        read_messages([USER, message])
    assert refused.value.param == f"messages.1{param}"
    assert text in str(refused.value)


def test_no_list_of_messages_and_too_many_names_of_other_fields_are_refused():
    for wrong in (None, "hi", 5, {}, []):
        with pytest.raises(RequestError, match="expected"):
            read_messages(wrong)
    messages = [USER | {f"field-{number}": 1} for number in range(MAX_EXTRA_FIELDS + 1)]
    with pytest.raises(RequestError, match="at most 64 unknown fields in messages, got 65"):
        read_messages(messages)
