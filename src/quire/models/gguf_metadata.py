"""Metadata of GGUF files that Transformers ignores: RoPE scaling, parts, and types of tensors.

llama.cpp stores the scaling of a model as a type with numbers (linear, yarn), as one divisor for
each frequency (`rope_freqs`, for llama3 scaling), or as two sets of divisors (longrope). A model
without its scaling computes other positions, and no error shows it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedConfig

from quire.errors import ModelError, UnsupportedModel
from quire.models.rope import LONGROPE

_DIVISORS = "rope_freqs.weight"
_SHORT, _LONG = "rope_factors_short.weight", "rope_factors_long.weight"
_SCALED_LAYERS = "full_attention"
_NO_TOKENIZER = "no_vocab"
_BETAS = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}


@dataclass(frozen=True, slots=True)
class GgufMetadata:
    """Metadata of a GGUF file.

    Attributes:
        file: the file.
        values: values by key.
        divisors: divisors of the rotary frequencies by the name of their tensor.
        undecodable: name of the first type of tensors that the package gguf cannot decode; "" if
            it decodes all of them.
    """

    file: Path
    values: Mapping[str, Any]
    divisors: Mapping[str, list[float]]
    undecodable: str

    @classmethod
    def read(cls, file: Path) -> "GgufMetadata":
        """Read the metadata; weights are mapped, but not decoded."""
        import gguf  # optional

        reader = gguf.GGUFReader(file)
        names = [
            name
            for name in reader.fields
            if ".rope." in name or name.startswith("split.") or name in _PLAIN_KEYS
        ]
        return cls(
            file,
            {name: reader.fields[name].contents() for name in names},
            {
                tensor.name: np.asarray(tensor.data, dtype=np.float64).ravel().tolist()
                for tensor in reader.tensors
                if tensor.name in (_DIVISORS, _SHORT, _LONG)
            },
            next((t.tensor_type.name for t in reader.tensors if not _decodable(t)), ""),
        )

    @property
    def has_tokenizer(self) -> bool:
        """Whether the file has a tokenizer."""
        return bool(self.values.get("tokenizer.ggml.model", _NO_TOKENIZER) != _NO_TOKENIZER)

    @property
    def end_token_ids(self) -> list[int]:
        """Tokens that end a text, a turn or a message."""
        return [int(self.values[key]) for key in _END_TOKENS if key in self.values]

    def check(self) -> None:
        """Refuse files that do not hold a whole model in types that can be decoded.

        Raises:
            ModelError: the file is one part of several.
            UnsupportedModel: a type of tensors that cannot be decoded.
        """
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
        """Set the file's RoPE scaling in a config, unless Transformers read it.

        Raises:
            UnsupportedModel: an unknown scaling.
        """
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
        for name, key in _BETAS.items():
            if (value := self._rope(f"scaling.{key}", None)) is not None:
                found[name] = value
        return found

    def _rope(self, name: str, default: Any) -> Any:
        architecture = self.values.get("general.architecture", "")
        return self.values.get(f"{architecture}.rope.{name}", default)


_END_TOKENS = tuple(f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom"))
_PLAIN_KEYS = ("general.architecture", "tokenizer.ggml.model", *_END_TOKENS)


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


def _decodable(tensor: Any) -> bool:
    """Whether the package gguf decodes a tensor's type, tried on its first row."""
    import gguf

    try:
        gguf.dequantize(tensor.data[:1], tensor.tensor_type)
    except NotImplementedError:
        return False
    return True
