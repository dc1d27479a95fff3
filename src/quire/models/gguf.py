"""GGUF files: Transformers reads the config and the tokenizer, and decodes the weights.

Metadata that Transformers ignores is read here: RoPE scaling, parts, and types of tensors.
llama.cpp stores the scaling of a model as a type with numbers (linear, yarn), as one divisor for
each frequency (`rope_freqs`, for llama3 scaling), or as two sets of divisors (longrope). A model
without its scaling computes other positions, and no error shows it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from quire.errors import ModelError, UnsupportedModel
from quire.models.foreign import foreign_code
from quire.models.gguf_header import GgufHeader, read_header, read_once
from quire.models.rope import LONGROPE
from quire.models.source import GGUF
from quire.models.weights import check_loaded, silence

_DIVISORS = "rope_freqs.weight"
_SHORT, _LONG = "rope_factors_short.weight", "rope_factors_long.weight"
_SCALED_LAYERS = "full_attention"
_NO_TOKENIZER = "no_vocab"


@dataclass(frozen=True, slots=True)
class GgufMetadata:
    """Metadata of a GGUF file."""

    file: Path
    values: Mapping[str, Any]
    divisors: Mapping[str, list[float]]  # of the rotary frequencies by the name of their tensor
    undecodable: str  # first type of tensors that the package gguf cannot decode

    @classmethod
    def read(cls, file: Path) -> "GgufMetadata":
        header = read_header(file)
        return cls(
            file,
            header.values,
            {
                tensor.name: header.data(tensor).astype(np.float64).ravel().tolist()
                for tensor in header.tensors
                if tensor.name in (_DIVISORS, _SHORT, _LONG)
            },
            _undecodable(header),
        )

    @property
    def has_tokenizer(self) -> bool:
        return bool(self.values.get("tokenizer.ggml.model", _NO_TOKENIZER) != _NO_TOKENIZER)

    @property
    def end_token_ids(self) -> list[int]:
        return [int(self.values[key]) for key in _END_TOKENS if key in self.values]

    def check(self) -> None:
        """Refuse files that do not hold a whole model in types that can be decoded."""
        parts = int(self.values.get("split.count", 1))
        if parts > 1:
            raise ModelError(
                f"{self.file} is one of {parts} parts of a model; merge them with llama.cpp's "
                "llama-gguf-split --merge, and pass the merged file"
            )
        if self.undecodable:
            raise UnsupportedModel(
                f"{self.file} has tensors of type {self.undecodable}, which the package gguf "
                "cannot decode; use a file in F16, BF16, Q8_0, Q6_K or Q4_K_M"
            )

    def set_rope(self, config: PreTrainedConfig) -> None:
        """Set the file's RoPE scaling in a config, unless Transformers read it."""
        parameters = getattr(config, "rope_parameters", None) or {}
        scaled = parameters.get(_SCALED_LAYERS, parameters)  # one set for each kind of layer
        if scaled.get("rope_type", "default") != "default" or "rope_theta" not in scaled:
            return
        found = scaled | self._scaling(config.max_position_embeddings)
        config.rope_parameters = (
            found if scaled is parameters else {**parameters, _SCALED_LAYERS: found}
        )

    def _scaling(self, max_positions: int) -> dict[str, Any]:
        kind = str(self._rope("scaling.type", ""))
        factor = self._rope("scaling.factor", self._rope("scale_linear", 0.0)) or 1.0
        original = self._rope("scaling.original_context_length", max_positions)
        if _DIVISORS in self.divisors:
            return _divided(self.divisors[_DIVISORS], self.divisors[_DIVISORS], max_positions, 1.0)
        if _LONG in self.divisors:
            attention = self._rope("scaling.attn_factor", 1.0)
            return _divided(self.divisors[_SHORT], self.divisors[_LONG], original, attention)
        if kind in ("", "linear"):
            return {"rope_type": "linear", "factor": factor} if factor != 1.0 else {}
        if kind == "yarn":
            return self._yarn(factor, original)
        if kind != "none":
            raise UnsupportedModel(
                f"{self.file} has RoPE scaling {kind!r}, which cannot be read from GGUF files; use "
                "the model's folder in Hugging Face format"
            )
        return {}

    def _yarn(self, factor: float, original: int) -> dict[str, Any]:
        found = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
        }
        attention = self._rope("scaling.attn_factor", self._rope("scaling.yarn_attn_factor", 1.0))
        if attention != 1.0:  # a factor on the default of YaRN
            found["attention_factor"] = attention * (0.1 * float(np.log(factor)) + 1.0)
        for name, key in {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}.items():
            if (value := self._rope(f"scaling.{key}", None)) is not None:
                found[name] = value
        return found

    def _rope(self, name: str, default: Any) -> Any:
        architecture = self.values.get("general.architecture", "")
        return self.values.get(f"{architecture}.rope.{name}", default)


_END_TOKENS = tuple(f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom"))


def _divided(
    short: list[float], long: list[float], original: int, attention: float
) -> dict[str, Any]:
    return {
        "rope_type": LONGROPE,
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": original,
        "attention_factor": attention,
    }


def _undecodable(header: GgufHeader) -> str:
    """The first type of tensors that the package gguf cannot decode, tried on a row; "" if none."""
    import gguf

    of_types = {tensor.kind: tensor for tensor in reversed(header.tensors)}
    for number, tensor in sorted(of_types.items()):
        kind = gguf.GGMLQuantizationType(number)
        try:
            gguf.dequantize(header.data(tensor)[:1], kind)
        except NotImplementedError:
            return str(kind.name)
    return ""


DTYPE = torch.bfloat16
"""Type of the decoded weights in memory, unless another one is requested."""


def refuse_folder(folder: Path) -> None:
    """Refuse a folder without config.json that has GGUF files."""
    files = sorted(folder.glob(f"*{GGUF}"))
    if files and not (folder / "config.json").exists():
        raise ModelError(
            f"{folder} has no config.json, but GGUF files: pass one of them, as in {files[0]}"
        )


def read_config(file: Path) -> tuple[PreTrainedConfig, GgufMetadata]:
    """Read the config of a GGUF file, with its RoPE scaling."""
    with foreign_code(f"{file} cannot be read"), read_once():
        metadata = GgufMetadata.read(file)
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            file.parent, gguf_file=file.name, local_files_only=True
        )
        metadata.check()
        metadata.set_rope(config)
    config.dtype = DTYPE
    return config, metadata


def load_tokenizer(folder: Path, name: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a GGUF file."""
    with foreign_code(f"the tokenizer in {folder / name} cannot be read"), silence(), read_once():
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, gguf_file=name, local_files_only=True
        )
        return tokenizer


def read_model(
    folder: Path, name: str, config: PreTrainedConfig, dtype: torch.dtype | None
) -> PreTrainedModel:
    """Build the model on the CPU with the decoded weights of a GGUF file."""
    undecodable = foreign_code(f"the weights in {folder / name} cannot be decoded")
    with undecodable, silence(), read_once():
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            gguf_file=name,
            config=config,
            dtype=dtype or DTYPE,
            attn_implementation="eager",
            local_files_only=True,
            output_loading_info=True,
        )
    model: PreTrainedModel = loaded[0]
    check_loaded(model, loaded[1], {}, folder / name)
    read_header(folder / name).release_pages()
    return model
