"""KV export: a request prefilled in one engine continues in another one or another process."""

import json
import subprocess
import sys
import zlib

import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from quire import LLM, KVConfig, PrefixCacheConfig, SamplingParams
from quire.errors import CorruptData, OutOfPages, RequestError, StorageError, UnsoundCombination
from reference import test_prefix_tier as tiers
from reference.test_prefix_tier import PROMPTS, answer, check_logits, model_of
from support.engines import greedy
from support.kv_options import kv_config
from support.prefix_index import Listener
from support.redis_servers import start_redis

PROMPT = PROMPTS["b"]
SAMPLING = greedy(8)
OPTIONS = [
    *({}, {"codec": "int8"}, {"codec": "int8+sinks=2+residual=6"}, {"codec": "int4_page/int8"}),
    {"evict": "h2o:cap=152,every=8,when=decode"},
    {"evict": "snapkv:window=8,cap=120,every=8,when=prefill_end"},
    {"evict": "recent:cap=152,every=8,sinks=4"},
    {"evict": "kvzip:cap=120,chunk=64"},
]


def llm_of(model="qwen3", **options):
    return LLM(
        model_of(model), kv=kv_config(**{"memory": 4 * tiers.MIB, "page_tokens": 4} | options)
    )


@pytest.fixture
def path(tmp_path):
    return tmp_path / "kv"


@pytest.fixture
def exported(path):
    llm_of().export_kv(PROMPT, path)
    return path


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(("qwen3", options) for options in OPTIONS),
        *((n, o) for n in ("gemma2", "opt", "gemma4", "llama4") for o in OPTIONS[:2]),
    ],
    ids=str,
)
def test_a_request_continues_after_an_import_without_its_prefill(name, options, path):
    plain, prefill, decode = (llm_of(name, **options) for _ in range(3))
    saved = prefill.export_kv(PROMPT, path, SAMPLING)
    loaded = decode.import_kv(path)
    [expected], [found] = (llm.generate(PROMPT, SAMPLING) for llm in (plain, decode))

    assert saved == loaded
    assert saved.num_tokens == 148 == found.usage.cached_tokens
    assert found.token_ids == expected.token_ids
    decode.engine.check()
    prefill.engine.check()


def test_the_retained_tokens_of_a_rule_are_those_without_an_export(path):
    options = {"evict": "h2o:cap=152,every=4,when=decode", "record_evictions": True}
    plain, prefill, decode = (llm_of(**options) for _ in range(3))
    prefill.export_kv(PROMPT, path, greedy(24))
    decode.import_kv(path)
    traces = []
    for llm in (plain, decode):
        llm.generate(PROMPT, request_id="r", sampling=greedy(24))
        traces.append([repr(entry) for entry in llm.engine.eviction_trace("r")])
    assert traces[0] == traces[1] != []


def test_the_kv_of_an_open_request_includes_its_output(path):
    prefill, decode = llm_of(), llm_of()
    stream, tokens = prefill.stream(PROMPT, greedy(30)), []
    while len(tokens) < 12:
        tokens += next(stream).token_ids
    saved = prefill.export_kv([*PROMPT, *tokens], path)
    rest = [token for delta in stream for token in delta.token_ids]

    decode.import_kv(path)
    [found] = decode.generate([*PROMPT, *tokens], greedy(30 - len(tokens)))

    assert saved.num_tokens == 160  # whole blocks of 161 tokens, whose last one is computed
    assert found.usage.cached_tokens == 160
    assert list(found.token_ids) == rest


def test_imports_publish_blocks_to_requests_of_the_same_tenant_and_salt(path):
    prefill, decode, computed, loaded = llm_of(), llm_of(), Listener(), Listener()
    prefill.engine.prefix_events.subscribe(computed)
    decode.engine.prefix_events.subscribe(loaded)
    prefill.export_kv(PROMPT, path)
    decode.import_kv(path)
    decode.import_kv(path)  # nothing is new
    assert loaded.known == computed.known
    assert len(loaded.known) == 37

    prefill, decode = llm_of(), llm_of()
    prefill.export_kv(PROMPT, path, cache_salt="x")
    decode.import_kv(path, cache_salt="y")
    cached = [
        decode.generate(PROMPT, SAMPLING, cache_salt=salt)[0].usage.cached_tokens
        for salt in ("", "x", "y")
    ]
    assert cached == [0, 0, 148]


def test_an_import_evicts_unused_prefixes_and_is_refused_without_free_pages(exported):
    small = llm_of(memory=128 << 10)
    small.generate(PROMPTS["a"], SAMPLING)
    small.import_kv(exported)
    [found] = small.generate(PROMPT, SAMPLING)
    assert found.usage.cached_tokens == 148

    stream = small.stream(PROMPTS["a"], greedy(30))
    next(stream)
    small.engine.scheduler.sequence_memory.drop_cached()
    with pytest.raises(OutOfPages, match="wait for running requests, or raise --kv-memory"):
        small.import_kv(exported)
    small.engine.check()
    assert len(list(stream)) > 10


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"model": "llama_mha"}, "expected KV with the fingerprint"),
        ({"codec": "int8"}, "expected KV with the fingerprint"),
        ({"page_tokens": 8}, "expected KV with the fingerprint"),
        ({"enable_prefix_caching": False}, "the prefix cache is off"),
    ],
)
def test_kv_of_other_engines_is_refused(other, says, exported):
    llm = llm_of(**other)
    with pytest.raises((RequestError, UnsoundCombination), match=says):
        llm.import_kv(exported)
    llm.engine.check()


def test_kv_of_a_rule_that_the_engine_does_not_allow_is_refused(path):
    rule = "h2o:cap=152,every=8,when=decode"
    llm_of(evict_allow="h2o").export_kv(PROMPT, path, SAMPLING, evict=rule)

    with pytest.raises(RequestError, match="h2o"):
        llm_of(evict_allow="snapkv").import_kv(path)
    llm = llm_of(evict_allow="h2o")
    llm.import_kv(path)
    [found] = llm.generate(PROMPT, SAMPLING, evict=rule)
    assert found.usage.cached_tokens == 148


@pytest.mark.parametrize("damage", ["flip", "cut", "other", "missing"])
def test_damaged_files_are_refused(damage, exported):
    data = bytearray(exported.read_bytes())
    flipped = bytes([*data[:-100], data[-100] ^ 1, *data[-99:]])
    exported.write_bytes({"flip": flipped, "cut": data[:-100]}.get(damage, b"text"))
    if damage == "missing":
        exported.unlink()
    with pytest.raises(CorruptData if damage == "flip" else StorageError, match="kv"):
        llm_of().import_kv(exported)


def test_other_sizes_short_prompts_and_bad_paths_are_refused(exported, path):
    with safe_open(exported, framework="numpy") as file:
        metadata = json.loads(file.metadata()["quire"])
    tensors = load_file(exported)
    for name, changed in (("blocks", tensors["blocks"][:-1]), ("tokens", tensors["tokens"][:-4])):
        metadata["sums"][name] = zlib.crc32(changed.tobytes())
        save_file({**tensors, name: changed}, exported, metadata={"quire": json.dumps(metadata)})
        with pytest.raises(RequestError, match=r"expected 3[67] blocks of"):
            llm_of().import_kv(exported)
        metadata["sums"][name] = zlib.crc32(tensors[name].tobytes())

    llm, scored = llm_of(), SamplingParams(max_tokens=1, prompt_logprobs=1)
    short = "a whole block of 4 tokens before its last token, got 4"
    for error, says, *arguments in (
        (RequestError, short, [5, 6, 7, 8], path),
        (StorageError, "cannot write", PROMPT, path / "none" / "kv"),
        (RequestError, "computes its whole prompt", PROMPT, path, scored),
    ):
        with pytest.raises(error, match=says):
            llm.export_kv(*arguments)


# ---- two processes -------------------------------------------------------------------------------

_PREFILL = """
import json, sys
from quire import LLM, KVConfig, PrefixCacheConfig, SamplingParams
job = json.loads(sys.argv[1])
cache = PrefixCacheConfig(**job["cache"])
llm = LLM("quire-tiny", dtype="float32", device="cpu", verify=False,
          kv=KVConfig(memory="32MiB", prefix_cache=cache))
if job["path"]:
    llm.export_kv(job["prompt"], job["path"], SamplingParams(max_tokens=12, temperature=0.0))
else:
    llm.generate(job["prompt"], SamplingParams(max_tokens=1, temperature=0.0))
    llm.flush_kv()
print("done", flush=True)
sys.stdin.readline()  # the engine stays open until the other one has decoded
"""


@pytest.mark.slow
@pytest.mark.parametrize("through", ["export", "redis", "file"])
def test_a_prompt_computed_in_another_process_is_not_recomputed(through, path, request):
    prompt = [5 + i * i % 89 for i in range(200)]
    exports, cache = str(path) if through == "export" else "", {}
    if through == "redis":
        server = start_redis()
        request.addfinalizer(server.close)
        cache = {"remote": server.url}
    elif through == "file":
        cache = {"remote": f"file://{path}", "remote_memory": "64MiB"}
    options = {"dtype": "float32", "device": "cpu", "verify": False}
    whole = PrefixCacheConfig(**cache, load="whole") if cache else PrefixCacheConfig()
    decode = LLM("quire-tiny", **options, kv=KVConfig(memory="32MiB", prefix_cache=whole))
    job = json.dumps({"prompt": prompt, "cache": cache, "path": exports})
    command, pipes = [sys.executable, "-c", _PREFILL, job], {"stdin": -1, "stdout": -1}
    process = subprocess.Popen(command, text=True, **pipes)
    assert process.stdout.readline() == "done\n"
    if exports:
        assert decode.import_kv(exports).num_tokens == 192
    sampling = SamplingParams(max_tokens=12, temperature=0.0)
    [found] = decode.generate(prompt, sampling)
    process.communicate("\n")

    [expected] = LLM("quire-tiny", **options).generate(prompt, sampling)
    assert found.usage.cached_tokens == 192
    assert found.token_ids == expected.token_ids
    decode.close()


def test_answers_after_an_import_have_the_logits_of_a_prefill(exported):
    llm = llm_of()
    llm.import_kv(exported)
    logits, usages = answer(llm.engine, tiers.B)
    assert usages["b"].cached_tokens == 148
    check_logits(logits, only="b")
