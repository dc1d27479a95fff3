"""GPTQ and AWQ checkpoints are decoded; other quantized checkpoints and variants are refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.errors import ModelError, UnsupportedModel
from quire.models import checkpoint
from quire.models.loader import load_model
from quire.models.native_linear import available_products
from support import zoo
from support.flat import flat_logits, sequences

GROUP = 16
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def pack_words(codes: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Pack codes [row, column] along columns into 32-bit words, code by code."""
    per_word = 32 // bits
    rows, columns = codes.shape
    words = torch.zeros(rows, columns // per_word, dtype=torch.int64)
    for word in range(columns // per_word):
        for slot in range(per_word):
            column = word * per_word + (slot if order is None else order[slot])
            words[:, word] |= codes[:, column] << (bits * slot)
    return words.where(words < 2**31, words - 2**32).to(torch.int32)


def quantize(weight: Tensor, bits: int, groups: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes [inner, outer], zeros and scales [group, outer], and the decoded weight."""
    codes, decoded = torch.empty_like(weight.T, dtype=torch.int64), torch.empty_like(weight.T)
    num_groups, outer = int(groups.max()) + 1, len(weight)
    zeros, scales = torch.empty(num_groups, outer).long(), torch.empty(num_groups, outer)
    for group in range(num_groups):
        part = weight.T[groups == group]
        low, high = part.amin(0).clamp_max(0), part.amax(0).clamp_min(0)
        scale = ((high - low) / (2**bits - 1)).half()
        zero = (-low / scale).round().clamp(1, 2**bits - 1).long()
        code = (part / scale + zero).round().clamp(0, 2**bits - 1).long()
        codes[groups == group], zeros[group], scales[group] = code, zero, scale.float()
        decoded[groups == group] = (code - zero) * scale.float()
    return codes, zeros, scales.half(), decoded.T


def write_checkpoint(folder: Path, name: str, options: dict[str, object]) -> dict[str, Tensor]:
    """Save a tiny model with coded layers; returns the decoded weights by name."""
    zoo.save(name, folder)
    path, decoded = folder / "model.safetensors", {}
    stored = load_file(path)
    method, bits = options["quant_method"], int(options["bits"])
    for key, weight in list(stored.items()):
        if not key.endswith("_proj.weight"):
            continue
        groups = torch.arange(weight.shape[1]) // GROUP
        if options.get("desc_act"):
            groups = groups[torch.randperm(len(groups), generator=torch.Generator().manual_seed(1))]
        codes, zeros, scales, decoded[key] = quantize(weight, bits, groups)
        layer = key.removesuffix(".weight")
        if method == "gptq":
            minus = 0 if options.get("checkpoint_format") == "gptq_v2" else 1
            stored[f"{layer}.qweight"] = pack_words(codes.T, bits).T.contiguous()
            stored[f"{layer}.qzeros"] = pack_words(zeros - minus, bits)
            stored[f"{layer}.g_idx"] = groups.int()
        else:
            stored[f"{layer}.qweight"] = pack_words(codes, bits, AWQ_ORDER)
            stored[f"{layer}.qzeros"] = pack_words(zeros, bits, AWQ_ORDER)
        stored[f"{layer}.scales"] = scales
        del stored[key]
    save_file(stored, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = options | {"group_size": GROUP}
    (folder / "config.json").write_text(json.dumps(config))
    return decoded


FORMATS = [
    {"quant_method": "gptq", "bits": 4},
    {"quant_method": "gptq", "bits": 4, "desc_act": True},
    {"quant_method": "gptq", "bits": 8, "checkpoint_format": "gptq_v2"},
    {"quant_method": "gptq", "bits": 2, "checkpoint_format": "gptq"},
    {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"},
]


@pytest.mark.parametrize(
    "options", FORMATS, ids=lambda options: "-".join(map(str, options.values()))
)
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_coded_layers_are_decoded(name: str, options: dict[str, object], tmp_path: Path) -> None:
    decoded = write_checkpoint(tmp_path, name, options)
    plain = zoo.build(name)
    plain.load_state_dict(decoded, strict=False)
    (prompt,) = sequences(11, vocab_size=zoo.VOCAB_SIZE)

    loaded = load_model(tmp_path, device="cpu", dtype="float32")

    (found,) = flat_logits(loaded.decoder, [prompt], chunk_tokens=[4])
    with torch.inference_mode():
        expected = plain(prompt[None]).logits[0]
    assert len(decoded) == 2 * 7
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)


def test_decoded_weights_have_the_dtype_of_the_config_or_the_requested_one(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama", FORMATS[0])

    assert load_model(tmp_path, device="cpu").decoder.dtype == torch.float32
    assert load_model(tmp_path, device="cpu", dtype="bfloat16").decoder.dtype == torch.bfloat16


@pytest.mark.skipif(available_products() is None, reason="no C extension with vector instructions")
def test_decoded_weights_can_be_quantized_again(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama", FORMATS[0])
    plain = load_model(tmp_path, device="cpu", dtype="bfloat16")
    coded = load_model(tmp_path, device="cpu", dtype="bfloat16", weight_codec="int8")

    assert coded.weight_bytes < plain.weight_bytes


@pytest.fixture
def no_weights_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(checkpoint, "read_model", fail)
    monkeypatch.setattr(checkpoint, "read_coded_model", fail)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quant_method": "gptq", "bits": 3}, r"GPTQ weights with bits=3 .*--weight-codec"),
        (
            {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
            r"checkpoint_format=marlin .*cannot be decoded",
        ),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, r"version=gemv .*--weight-codec"),
    ],
)
def test_other_variants_are_refused(
    options: dict[str, object], message: str, tmp_path: Path, no_weights_read: None
) -> None:
    write_checkpoint(tmp_path, "llama", {"quant_method": "gptq", "bits": 4})
    _set_quantization(tmp_path, options)

    with pytest.raises(UnsupportedModel, match=message):
        load_model(tmp_path, device="cpu")


@pytest.mark.skipif(available_products() is None, reason="no C extension with vector instructions")
def test_a_codec_for_another_quantized_checkpoint_is_refused(
    tmp_path: Path, no_weights_read: None
) -> None:
    zoo.save("llama", tmp_path)
    _set_quantization(tmp_path, {"quant_method": "fp8"})

    with pytest.raises(UnsupportedModel, match=r"quantized already \(fp8\); leave out the codec"):
        load_model(tmp_path, device="cpu", weight_codec="int4")


def test_a_method_that_transformers_cannot_load_names_alternatives(tmp_path: Path) -> None:
    zoo.save("llama", tmp_path)
    _set_quantization(tmp_path, {"quant_method": "quark"})  # its package is not installed

    with pytest.raises(
        ModelError, match=r"quantized \(quark\).*--weight-codec int8 .*a GPTQ check"
    ):
        load_model(tmp_path, device="cpu")


def test_a_missing_part_of_a_layer_is_named(tmp_path: Path, no_weights_read: None) -> None:
    write_checkpoint(tmp_path, "llama", FORMATS[0])
    path = tmp_path / "model.safetensors"
    stored = load_file(path)
    del stored["model.layers.1.mlp.up_proj.scales"]
    save_file(stored, path, metadata={"format": "pt"})

    with pytest.raises(UnsupportedModel, match=r"no model.layers.1.mlp.up_proj.scales"):
        load_model(tmp_path, device="cpu")


def test_codes_that_do_not_fit_the_config_are_refused(
    tmp_path: Path, no_weights_read: None
) -> None:
    write_checkpoint(tmp_path, "llama", FORMATS[0])
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))

    with pytest.raises(ModelError, match="mlp"):
        load_model(tmp_path, device="cpu")


def _set_quantization(folder: Path, options: dict[str, object]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"quantization_config": options}))
