"""The files of a model: a folder in Hugging Face format, or a GGUF file.

Opening a checkpoint reads its config only.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers import __version__ as transformers_version

from quire.errors import ConfigError, ModelError, UnsupportedModel
from quire.layout.config import check_sizes, read_config
from quire.layout.limits import refuse_model_type
from quire.models import gguf
from quire.models.foreign import foreign_code
from quire.models.generation import GenerationDefaults, read_generation_defaults
from quire.models.source import find_model
from quire.models.stored import (
    StoredTensor,
    check_shapes,
    coded_layers,
    model_without_memory,
    read_headers,
    with_alternative,
)
from quire.models.support import model_class, refuse_class, refuse_config
from quire.models.tokenizer import load_tokenizer
from quire.models.weights import read_coded_model, read_model


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A model folder."""

    name: str
    folder: Path
    config: PreTrainedConfig
    generation: GenerationDefaults
    trust_remote_code: bool = False  # run Python code from the folder

    def check(self) -> None:
        """Compare the config with the headers of the weight files."""
        coded, headers = coded_layers(self.config), self._headers
        if coded is not None:
            headers = coded.headers(headers)
        check_shapes(self._plain_config, headers, trust_remote_code=self.trust_remote_code)

    def model_without_memory(self) -> PreTrainedModel:
        return model_without_memory(self._plain_config, trust_remote_code=self.trust_remote_code)

    def load_tokenizer(self) -> PreTrainedTokenizerBase | None:
        return load_tokenizer(self.folder, trust_remote_code=self.trust_remote_code)

    def read_model(self, dtype: torch.dtype | None) -> PreTrainedModel:
        coded = coded_layers(self.config)
        if coded is not None:
            return read_coded_model(
                self.folder, self._plain_config, self._headers, coded, dtype=dtype
            )
        with with_alternative(self.config):
            return read_model(
                self.folder,
                self.config,
                self._headers,
                dtype=dtype,
                trust_remote_code=self.trust_remote_code,
            )

    @cached_property
    def _headers(self) -> dict[str, StoredTensor]:
        return read_headers(self.folder)

    @cached_property
    def _plain_config(self) -> PreTrainedConfig:
        """The config of the decoded model, if its layers are decoded while they are read."""
        if coded_layers(self.config) is None:
            return self.config
        config = copy.deepcopy(self.config)
        del config.quantization_config
        return config


@dataclass(frozen=True, kw_only=True)
class GgufCheckpoint(Checkpoint):
    """A GGUF file; Transformers decodes its weights."""

    file: str
    has_tokenizer: bool

    def check(self) -> None: ...

    def load_tokenizer(self) -> PreTrainedTokenizerBase | None:
        return gguf.load_tokenizer(self.folder, self.file) if self.has_tokenizer else None

    def read_model(self, dtype: torch.dtype | None) -> PreTrainedModel:
        return gguf.read_model(self.folder, self.file, self.config, dtype)


def open_checkpoint(path: str | Path, *, trust_remote_code: bool = False) -> Checkpoint:
    """Find a model, and read and check its config."""
    folder, name = find_model(path)
    if folder.is_file():  # of GGUF
        return _open_gguf(folder, name)
    gguf.refuse_folder(folder)
    raw = read_config(folder)
    config = _config(folder, raw, trust_remote_code=trust_remote_code)
    vocab_size = getattr(config.get_text_config(), "vocab_size", None)
    return Checkpoint(
        name=name,
        folder=folder,
        config=config,
        generation=read_generation_defaults(folder, raw, vocab_size),
        trust_remote_code=trust_remote_code,
    )


def _open_gguf(file: Path, name: str) -> GgufCheckpoint:
    config, metadata = gguf.read_config(file)
    refuse_config(config)
    _refuse_without_class(config, has_code=False)
    vocab_size = getattr(config.get_text_config(), "vocab_size", None)
    return GgufCheckpoint(
        name=name,
        folder=file.parent,
        file=file.name,
        has_tokenizer=metadata.has_tokenizer,
        config=config,
        generation=read_generation_defaults(  # of the file, not of its folder
            file, {"eos_token_id": metadata.end_token_ids}, vocab_size
        ),
    )


def _config(
    folder: Path, raw: Mapping[str, object], *, trust_remote_code: bool
) -> PreTrainedConfig:
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise ModelError(
            f"{folder / 'config.json'} has no 'model_type': add it, for example 'llama'"
        )
    refuse_model_type(model_type)
    if model_type not in CONFIG_MAPPING:
        if "auto_map" not in raw:
            raise UnsupportedModel(
                f"Transformers {transformers_version} does not know {model_type!r} models; a newer "
                "version may: pip install --upgrade transformers"
            )
        if not trust_remote_code:
            raise ConfigError(
                f"{model_type!r} is a model with its own Python code, which would run with your "
                "permissions; read it, then pass trust_remote_code=True to run it"
            )
    check_sizes(raw)
    with foreign_code(f"{folder / 'config.json'} cannot be read"):
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
        refuse_config(config)
    _refuse_without_class(config, has_code="auto_map" in raw and trust_remote_code)
    return config


def _refuse_without_class(config: PreTrainedConfig, *, has_code: bool) -> None:
    found = model_class(config)
    if found is not None:
        refuse_class(found)
    elif not has_code:
        raise UnsupportedModel(
            f"Transformers has no causal language model for {config.model_type!r}; "
            "use a decoder-only model such as Llama, Qwen or Mistral"
        )
