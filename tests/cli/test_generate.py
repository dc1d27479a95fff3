"""`quire generate`, `chat` and `serve` on the packaged model and damaged copies of it."""

import json
import logging
import shutil
import socket
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, KVConfig, SamplingParams
from quire.models.source import find_model
from quire.policies.registry import temporary_registrations
from quire.serve.config import ServerConfig
from quire.serve.errors import Unauthorized
from support import zoo
from support.command_line import last_json, read_records

QUICK = ("--kv-memory", "2MiB", "--no-verify", "--max-tokens", "5", "--dtype", "float32")
PROMPT = "<|doc|>The king said"


@pytest.fixture(scope="module")
def expected():
    llm = LLM("quire-tiny", dtype="float32", kv=KVConfig(memory="2MiB"), verify=False)
    return llm.generate(PROMPT, SamplingParams(max_tokens=5))[0]


def test_output_is_on_stdout_and_usage_on_stderr(quire, expected):
    result = quire("generate", "--prompt", PROMPT, *QUICK)
    assert result.exit_code == 0
    assert result.stdout == expected.text + "\n"
    assert result.stderr.startswith("[cut at max_tokens=5: --max-tokens N raises it]\n")
    assert "5 output tokens" in result.stderr


@pytest.mark.parametrize("options", [("--max-tokens", "300"), ("--n", "2")])
def test_max_tokens_is_lowered_to_the_kv_memory(quire, options):
    quick = ("--no-verify", "--dtype", "float32", "--kv-memory", "512KiB", "--ignore-eos")
    result = quire("generate", "--prompt", PROMPT, *quick, *options)

    assert result.exit_code == 0, result.stderr
    rest = ", the rest of the KV memory: a shorter prompt or a larger --kv-memory leaves more]\n"
    assert rest in result.stderr


@pytest.mark.parametrize(
    ("options", "rows"), [((), 1), (("--n", "3"), 3), (("--max-num-seqs", "2"), 2)]
)
def test_automatic_kv_memory_is_that_of_the_sequences_of_one_prompt(quire, options, rows):
    quick = ("--no-verify", "--max-tokens", "2", "--dtype", "float32", "--max-model-len", "1024")
    result = quire("generate", "--prompt", PROMPT, *quick, *options, "-v")

    kv_bytes = int(result.stderr.split(" B of KV")[0].split("\n")[-1].replace(",", ""))
    assert result.exit_code == 0
    assert kv_bytes == rows * 1024 * 8192  # tokens, and bytes of a token in float32


RULE = """
from dataclasses import dataclass
from quire.policies.recent import Recent
from quire.policies.registry import register

@register("of_file")
@dataclass(frozen=True, slots=True)
class OfFile(Recent):
    pass
"""


def test_rule_of_a_policy_file_is_known_to_the_command(quire, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my_rule.py").write_text(RULE)
    Path("options.toml").write_text("[kv]\npolicy_file = 'my_rule.py'\nevict = 'of_file:cap=3'\n")
    runs = (["--policy-file", "my_rule.py", "--evict", "of_file:cap=3"], ["--config=options.toml"])
    plan = ["plan", "quire-tiny", "--maximize-batch", "512,128", "--evict", "of_file:cap=128"]

    def in_a_process(*arguments):
        with temporary_registrations():
            result = quire(*arguments)
        assert result.exit_code == 0, result.stderr
        return result

    for options in runs:
        printed = in_a_process("generate", "--prompt", PROMPT, *QUICK, *options).stderr
        assert "tokens evicted" in printed.replace("0 tokens evicted", "")
    of_file = ("--policy-file", "my_rule.py")
    shown = in_a_process("policies", "of_file", *of_file).stdout
    in_a_process(*plan, *of_file)
    in_a_process(*" ".join(shown.split()).partition("example quire ")[2].split(), *QUICK)
    missing = quire("generate", "--prompt", PROMPT, *QUICK, "--policy-file", "no.py")
    unknown = quire("generate", "--prompt", PROMPT, *QUICK, "--evict", "of_file:cap=3")

    assert "expected --policy-file as a Python file, got" in missing.stderr
    assert (missing.exit_code, unknown.exit_code) == (2, 2)
    assert "--policy-file" in unknown.stderr


def broken_rule(folder: Path, score: str) -> tuple[object, ...]:
    file = folder / "broken.py"
    file.write_text(RULE.replace("pass", f"def score(self, view): return {score}"))
    return "--evict", "of_file:cap=3", "--policy-file", file


def test_rule_that_fails_is_an_error_without_a_count_of_evicted_tokens(quire, tmp_path):
    rule = broken_rule(tmp_path, "view.positions[0] * 1.0")
    with temporary_registrations():
        failed = quire("generate", "--prompt", PROMPT, *QUICK, *rule)
    assert failed.exit_code != 0
    assert "of shape [lanes, slots] = [" in failed.stderr
    assert "prompt tokens" in failed.stderr
    assert "evicted" not in failed.stderr


def test_a_rule_that_raises_is_named_with_its_line_or_traceback(quire, tmp_path, caplog):
    rule = broken_rule(tmp_path, "{}['foo']")
    with temporary_registrations(), caplog.at_level(logging.WARNING, logger="quire.eviction"):
        caplog.handler.setLevel(logging.DEBUG)
        failed = quire("generate", "--prompt", PROMPT, *QUICK, *rule)
        silent = not caplog.text
        quire("generate", "--prompt", PROMPT, *QUICK, *rule, "--verbose")

    line = RULE[: RULE.index("pass")].count("\n") + 1
    assert f"policy OfFile raised KeyError: 'foo' (broken.py, line {line})" in failed.stderr
    assert silent
    assert f'File "{rule[-1]}", line {line}, in score' in caplog.text


def test_an_unusable_tier_is_a_warning_or_an_error(quire, expected, tmp_path, caplog):
    (tmp_path / "kv").write_text("not a folder")
    tiers = ("--disk-kv-memory", "1MiB", "--disk-kv-path", tmp_path / "kv")

    result = quire("generate", "--prompt", PROMPT, *QUICK, *tiers)
    refused = quire("generate", "--prompt", PROMPT, *QUICK, *tiers, "--require-tiers")

    assert (result.exit_code, refused.exit_code) == (0, 2)
    assert result.stdout == expected.text + "\n"
    assert caplog.text.count("the disk tier of cached prefixes is not used for now") == 1
    assert "name another folder" in refused.stderr
    assert "start without --require-tiers" in refused.stderr


def test_json_is_all_of_standard_output_and_a_cap_above_the_prompt_evicts_nothing(quire, expected):
    capped = quire("generate", "--prompt", PROMPT, "--evict", "recent:cap=9000", *QUICK)
    assert capped.stdout == expected.text + "\n"
    assert "0 tokens evicted (no eviction was needed under 'recent:cap=9000')" in capped.stderr
    assert "evicted" not in quire("generate", "--prompt", PROMPT, *QUICK).stderr

    result = quire("generate", "-p", PROMPT, "--json", *QUICK)
    report = json.loads(result.stdout)

    assert result.stdout.count("\n") == 1
    assert expected.text in result.stderr
    given = {"text": expected.text, "token_ids": list(expected.token_ids)}
    assert report.items() >= (given | {"finish_reason": "length"}).items()
    assert report["usage"]["completion_tokens"] == 5
    assert report["config"]["kv"]["memory"] == 2 << 20


def test_several_choices_are_printed_in_order_and_beams_with_scores(quire):
    options = ("--n", "2", "--temperature", "1", "--seed", "3")
    result = quire("generate", "-p", PROMPT, "--json", *options, *QUICK)
    report = last_json(result)

    texts = [choice["text"] for choice in report["choices"]]
    assert f"[0]\n{texts[0]}\n[1]\n{texts[1]}\n" in result.stderr
    assert report["text"] == texts[0]
    beams = ("--n", "2", "--use-beam-search", "--beam-width", "3")
    result = quire("generate", "-p", PROMPT, "--json", *beams, *QUICK)
    best, second = last_json(result)["choices"]

    assert best["score"] > second["score"]
    assert f"[0, score {best['score']:.3f}]\n{best['text']}\n[1, score" in result.stderr


def assert_refused(result, *parts: str) -> None:
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith("error: ")
    for part in parts:
        assert part in result.stderr


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        *((("--device", "abacus"), "abacus"), (("--device", "cuda:99"), "cuda")),
        *((("--evict", "recnt:cap=9"), "recent"), (("--evict", "recent"), "cap")),
        (("--kv-codec", "int5"), "int5"),
        (("--kv-codec", "kvquant4"), "with quire calibrate quire-tiny --kv-codec kvquant4, or"),
        (
            ("--kv-codec", "kvquant4", "--kv-constants", "a b"),
            "--kv-codec kvquant4 --output 'a b', o",
        ),
        (("--kv-memory", "1KiB"), "--kv-memory"),
        (("--scratch", "-1"), "-1"),
    ],
)
def test_invalid_options_are_one_error_line(quire, arguments, part):
    assert_refused(quire("generate", "-p", PROMPT, "--no-verify", *arguments), part)


@pytest.mark.parametrize(
    ("prompt", "part"),
    [
        ("one two three " * 3000, "4096"),  # more than the context
        ("one two three " * 300, "2,097,152 B"),  # more than the KV memory
        ("", "empty"),
        ("\n", "empty"),
    ],
)
def test_prompt_that_cannot_run_is_refused_with_the_cause(quire, prompt, part):
    assert_refused(quire("generate", *QUICK, input=prompt), part)


def test_incomplete_model_folders_are_refused_with_the_missing_file(quire, tmp_path: Path):
    empty, no_weights = tmp_path / "empty", tmp_path / "no-weights"
    empty.mkdir()
    zoo.save("llama", no_weights)
    (no_weights / "model.safetensors").unlink()
    no_weights.joinpath("generation_config.json").unlink(missing_ok=True)

    missing = {tmp_path / "nowhere": "nowhere", empty: "config.json", no_weights: "no-weights"}
    for folder, part in missing.items():
        assert_refused(quire("generate", folder, "-p", "x"), part)


def test_chat_replies_to_every_line_and_a_text_needs_a_tokenizer(quire, zoo_folder):
    message = "hello\n\nhello\n/clear\nhello\n/exit\nnever\n"

    result = quire("chat", *QUICK, input=message)

    replies = [line for line in result.stdout.splitlines() if line]
    assert result.exit_code == 0
    assert "conversation cleared" in result.stderr
    assert len(replies) == 3
    assert replies[0] == replies[2]  # after /clear the same message has the same reply
    other = quire("chat", *QUICK, "--system", "It was night. ", input="hello\n").stdout
    assert other.strip() != replies[0]

    generated = quire("generate", zoo_folder, "-p", "x", "--kv-memory", "1MiB")
    chat = quire("chat", zoo_folder, "--kv-memory", "1MiB", input="hello\n")
    assert_refused(generated, "no tokenizer")
    assert "no tokenizer" in chat.stderr


@pytest.fixture
def served(monkeypatch) -> list[tuple]:
    """What `quire serve` would serve: model, address, configuration and keys."""
    calls = []

    def run_server(llm, bound, config, **options):
        calls.append((llm.model.name, bound.getsockname()[0], config, options["tenant_keys"]))

    monkeypatch.setattr("quire.serve.app.run_server", run_server)
    return calls


def test_serve_passes_model_address_and_keys(quire, served):
    result = quire("serve", "--no-verify", "--kv-memory", "2MiB", "--port", "0", "--host", "::1")

    assert result.exit_code == 0
    [(model, address, config, keys)] = served
    assert (model, address) == ("quire-tiny", "::1")
    assert config == ServerConfig(host="::1", port=0)
    assert not keys.tells_tenants_apart


@pytest.mark.parametrize("arguments", [(), ("--api-key", "sk-option-1")])
def test_serve_reads_the_key_of_the_default_tenant(quire, served, monkeypatch, arguments):
    monkeypatch.setenv("QUIRE_API_KEY", "sk-variable-1")

    quire("serve", "--no-verify", "--kv-memory", "2MiB", "--port", "0", *arguments)

    [(*_, keys)] = served
    for key in ("sk-variable-1", *arguments[1:]):
        assert keys.tenant_of(f"Bearer {key}") == "default"
    with pytest.raises(Unauthorized):
        keys.tenant_of(None)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--port", "70000"), "a port from 0 to 65535"),
        (("--max-body", "0"), "max-body of at least 1 byte"),
        (("--max-body", "much"), "not a size"),
        (("--header-timeout", "0"), "header-timeout > 0"),
        (("--header-timeout", "nan"), "header-timeout > 0"),
        (("--timeout-keep-alive", "0"), "timeout-keep-alive > 0"),
        (("--unknown-fields", "keep"), "one of refuse, warn, got 'keep'"),
        (("--tokenizer-threads", "0"), "1 to 64 tokenizer-threads"),
        (("--served-model-name", ""), "served-model-name"),
        (
            ("--ssl-certfile", "none.pem"),
            "cannot read --ssl-certfile none.pem: No such file or dir",
        ),
        (("--tenant-keys", "keys.toml"), "expected at least one API key, got none"),
        *(
            (
                ("--tenants", "a;b", *key),
                f"{source} has a key of tenant 'default', but --tenants onl",
            )
            for key, source in (
                ((), "the environment variable QUIRE_API_KEY"),
                (("--api-key", "sk-option-1"), "--api-key"),
            )
        ),
    ],
)
def test_serve_refuses_invalid_options_before_the_model_is_loaded(
    quire, flags, message, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    Path("keys.toml").write_text("# a = 'sk-a-2f0c77d1'\n")
    if "--tenants" in flags:
        monkeypatch.setenv("QUIRE_API_KEY", "sk-variable-1")

    result = quire("serve", "./no-such-model", *flags)

    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_the_environment_is_checked_before_the_model_is_loaded(quire, monkeypatch):
    monkeypatch.setattr("quire.cli.settings.Settings.open_llm", lambda _: pytest.fail("loaded"))
    with socket.create_server(("127.0.0.1", 0)) as listener:  # a port in use
        result = quire("serve", "--port", listener.getsockname()[1])
    assert_refused(result, "cannot listen on 127.0.0.1 port")
    monkeypatch.setenv("QUIRE_METRICS_KEY", "short")
    result = quire("serve", "./no-such-model")
    assert "QUIRE_METRICS_KEY: expected at least 8" in " ".join(result.stderr.split())
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "scipy", None)
    result = quire("generate", "no-such-model", PROMPT, "--evict", "kmeans:cap=64")
    assert_refused(result, "pip install 'quire-llm[kmeans]'")


def test_kv_events_are_appended_to_a_file(quire, tmp_path: Path):
    events = tmp_path / "events.jsonl"
    events.write_text('{"kind": "before"}\n', encoding="utf-8")

    quire("generate", "-p", PROMPT, "--kv-events", events, *QUICK)

    records = read_records(events)
    assert [record["kind"] for record in records[:2]] == ["before", "admitted"]
    assert records[-1]["kind"] == "freed"
    assert [record["number"] for record in records[1:]] == list(range(1, len(records)))


def test_places_for_kv_events_are_checked_before_the_model_is_loaded(quire, tmp_path: Path):
    events = tmp_path / "nowhere" / "events.jsonl"
    result = quire("generate", "no such model", "-p", PROMPT, "--kv-events", events)
    assert_refused(result, "KV events cannot be written", "events.jsonl", "--kv-events")

    result = quire("serve", "no such model", "--kv-events-endpoint", "nonsense")
    missing = any(find_spec(module) is None for module in ("zmq", "msgpack"))
    assert_refused(result, "quire-llm[events]" if missing else "tcp://*:5557")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_full_disk_for_events_keeps_the_output(quire, expected):
    result = quire("generate", "-p", PROMPT, "--kv-events", "/dev/full", *QUICK)
    assert result.exit_code == 2
    assert result.stdout == expected.text + "\n"
    assert "5 output tokens" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: KV events cannot be written to /dev/")


@pytest.mark.parametrize(
    ("of_file", "arguments", "given"),
    [
        *((True, (PROMPT,), None), (True, ("quire-tiny",), PROMPT), (True, ("-p", PROMPT), "")),
        *((True, ("quire-tiny", PROMPT), None), (False, ("quire-tiny", PROMPT), None)),
        *((False, ("quire-tiny",), PROMPT), (False, (), PROMPT + "\n")),
    ],
)
def test_text_is_the_prompt_if_the_model_is_known(
    quire, expected, tmp_path, of_file, arguments, given
):
    file = tmp_path / "tuned.toml"
    file.write_text('model = "quire-tiny"\n')
    config = ("--config", file) if of_file else ()

    result = quire("generate", *config, *arguments, *QUICK, input=given)

    assert result.stdout == expected.text + "\n"
    if of_file:
        assert "none/such" in quire("generate", *config, "none/such", "-p", PROMPT).stderr


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("-p", "a\udc80", *QUICK), ("surrogate",)),
        (("quire-tiny", "x", "-p", "y"), ("two prompts, 'x' and --prompt 'y'", "leave one out")),
        (("quire-tiny",), ("prompt is empty", "quire generate MODEL PROMPT", "--prompt")),
        (("x " * 2_000,), ("as the first argument",)),  # longer than a file name
        ((PROMPT,), ("as the first argument", f"quire generate quire-tiny '{PROMPT}'")),
        (("--model", "m", "-p", "x"), ("--model is not an option", "quire generate MODEL PROMPT")),
    ],
)
def test_arguments_without_a_usable_prompt_are_refused(quire, arguments, parts):
    assert_refused(quire("generate", *arguments), *parts)


@pytest.mark.parametrize(
    ("command", "more", "usage"),
    [
        *(
            (command, "", f"quire {command} MODEL")
            for command in ("chat", "serve", "profile", "calibrate", "plan", "doctor", "eval run")
        ),
        ("batch", "in.jsonl out.jsonl", "quire batch MODEL INPUT OUTPUT"),
        ("simulate", "--trace t.csv", "quire simulate MODEL"),
        ("bench latency", "", "quire bench latency MODEL"),
    ],
)
@pytest.mark.parametrize("option", [("--model", "m"), ("--model=m",), ("-m", "m")])
def test_model_as_an_option_is_refused_with_the_usage(quire, command, more, usage, option):
    result = quire(*command.split(), *more.split(), *option)
    assert_refused(result, f"{option[0][:7]} is not an option: the model is the first argument")
    assert result.stderr.strip().endswith(f"as in {usage}")


@pytest.mark.slow
def test_kv_cache_dtype_and_max_model_len_are_read(quire):
    found = [
        quire("generate", "quire-tiny", PROMPT, *QUICK, flag, value, "--json")
        for flag, value in (("--kv-codec", "int8"), ("--kv-cache-dtype", "int8_per_token_head"))
    ]
    plain = quire("generate", "quire-tiny", PROMPT, *QUICK, "--kv-cache-dtype", "auto", "--json")

    peaks = [last_json(result)["usage"]["kv_peak_bytes"] for result in (*found, plain)]
    assert peaks[0] == peaks[1] < peaks[2]

    short = quire("generate", "quire-tiny", "word " * 60, *QUICK, "--max-model-len", "32")
    result = quire("generate", "quire-tiny", PROMPT, *QUICK, "--max-model-len", "9", "--json")
    long = quire("generate", "quire-tiny", PROMPT, *QUICK, "--max-model-len", "99999")

    assert "the model's context 32" in short.stderr
    usage = last_json(result)["usage"]
    assert usage["prompt_tokens"] + usage["completion_tokens"] == 9
    cut = "[cut at max_tokens=4, the rest of the context: a shorter prompt leaves more]"
    assert cut in result.stderr
    assert "expected max_model_len (--max-model-len) from 1 to 4096" in long.stderr


# ---- damaged models ------------------------------------------------------------------------------


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return Path(shutil.copytree(find_model("quire-tiny")[0], tmp_path / "tiny"))


def _assert_one_error_line(result, message: str) -> None:
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 3}, "of which 5 would be ignored"),
        ({"num_hidden_layers": 1_000_000}, "'num_hidden_layers' is 1000000, expected 10000"),
        ({"head_dim": 0}, "'head_dim' is 0, expected an integer from 1"),
        ({"num_attention_heads": 0}, "'num_attention_heads' is 0, expected an integer from 1"),
        ({"num_key_value_heads": 0}, "'num_key_value_heads' is 0, expected an integer from 1"),
        ({"vocab_size": -1}, "'vocab_size' is -1, expected an integer from 1"),
        ({"hidden_act": "nope"}, "'hidden_act' is 'nope', which Transformers does not know"),
    ],
)
def test_invalid_config_is_refused(quire, tiny: Path, changes: dict, message: str):
    path = tiny / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    _assert_one_error_line(quire("generate", tiny, "-p", "x"), message)


def test_invalid_generation_config_is_refused_and_another_eos_token_id_ignored(quire, tiny):
    temperature = {"do_sample": True, "temperature": "hot"}
    for values, message in (
        (temperature, "'temperature' is 'hot', expected a number"),
        ({"eos_token_id": ["a"]}, "'eos_token_id' is ['a'], expected a token id"),
        ({"max_new_tokens": "x"}, "'max_new_tokens' is 'x', expected an integer from 1"),
    ):
        (tiny / "generation_config.json").write_text(json.dumps(values))
        result = quire("generate", tiny, "-p", "x")
        _assert_one_error_line(result, f"generation_config.json: {message}")
    (tiny / "generation_config.json").write_text(json.dumps({"eos_token_id": 10**9}))
    result = quire("generate", tiny, "-p", "x", "--max-tokens", "4", "--min-tokens", "2")

    assert result.exit_code == 0
    assert result.stdout


@pytest.mark.parametrize("command", ["generate", "plan"])
def test_nested_config_and_model_name_of_300_characters_are_refused(
    quire, tiny, monkeypatch, command
):
    def offline(*_: object, **__: object) -> str:
        raise OSError("no network")

    monkeypatch.setattr("quire.models.source.snapshot_download", offline)
    (tiny / "config.json").write_text("[" * 100_000)
    prompt = ("-p", "x") if command == "generate" else ()

    _assert_one_error_line(quire(command, tiny, *prompt), "nested too deeply")
    _assert_one_error_line(quire(command, "a" * 300, *prompt), "there is no folder 'aaa")


def test_nan_weight_is_refused(quire, tiny: Path):
    name = "model.layers.2.mlp.up_proj.weight"
    tensors = load_file(tiny / "model.safetensors")
    tensors[name].view(-1)[7] = torch.nan
    save_file(tensors, tiny / "model.safetensors", metadata={"format": "pt"})

    _assert_one_error_line(quire("generate", tiny, "-p", "x"), f"weights contain NaN in {name}")
