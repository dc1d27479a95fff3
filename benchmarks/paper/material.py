"""Inputs of measuring functions: the model, files of examples, and the differences they cause."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from benchmarks.common.graded_prompts import load
from benchmarks.paper.shapes import RANDOM, config_of, is_shape
from quire.cli.report import hardware
from quire.cli.settings import Settings

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from benchmarks.eviction.texts import RunningText
    from quire.models.loader import LoadedModel

Value = TypeVar("Value")

_RANDOM_CONTEXT = 8_192
_SHARED_TOKENIZER = "quire-tiny"


@dataclass(frozen=True, kw_only=True)
class Material:
    """Inputs of one run of the command.

    Attributes:
        settings: selects the model, its dtype and its device.
        files: files of examples by task.
        text: text file for perplexity; None: the shipped books.
        samples: prompts of each task; 0: the item's own number.
        layers: layers of random weights; 0: all of the shape.
        quick: whether items run in their small form.
    """

    settings: Settings
    files: Mapping[str, Path] = field(default_factory=dict)
    text: Path | None = None
    samples: int = 0
    layers: int = 0
    quick: bool = False
    _known: dict[str, object] = field(default_factory=dict, repr=False)

    # ---- models --------------------------------------------------------------------------------

    @property
    def random_shape(self) -> str | None:
        """Shape of the random weights; None: trained weights."""
        name = self.settings.model
        return name.removeprefix(RANDOM) if name.startswith(RANDOM) else None

    @property
    def model_name(self) -> str:
        """Display name of the model."""
        if self.random_shape is None:
            return Path(self.settings.model).name
        spec = self.model.spec
        layers = f"{spec.num_layers} layer{'s' * (spec.num_layers > 1)}"
        return f"random weights, {self.random_shape} with {layers}"

    @cached_property
    def model(self) -> "LoadedModel":
        """The model in Quire's decoder, loaded on first use."""
        return load(self.settings) if self.random_shape is None else self._random_model()

    @cached_property
    def dense(self) -> "PreTrainedModel":
        """The same weights in Transformers' model, for dense batches."""
        import torch
        from transformers import AutoModelForCausalLM

        if self.random_shape is not None:
            return self._random_weights()
        dense: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            self.model.folder or self.settings.model,
            dtype=self.model.decoder.dtype,
            attn_implementation="sdpa",
        )
        torch.nn.Module.to(dense, self.model.decoder.device)
        torch.nn.Module.eval(dense)
        return dense

    def _random_weights(self) -> "PreTrainedModel":
        from transformers import AutoConfig

        from benchmarks.common.models import random_weights

        config = config_of(self.random_shape or "", self.layers)
        kind = str(config.pop("model_type"))
        config["max_position_embeddings"] = max(
            _RANDOM_CONTEXT, cast("int", config["max_position_embeddings"])
        )
        made = AutoConfig.for_model(kind, **config)
        return random_weights(made, dtype=self._dtype, device=self._device)

    def _random_model(self) -> "LoadedModel":
        """Random weights with quire-tiny's tokenizer, whose ids every shape's vocabulary has."""
        from quire.models.generation import GenerationDefaults
        from quire.models.loader import LoadedModel, load_model
        from quire.models.native.select import make_decoder
        from quire.models.weights import weight_bytes

        model = self._random_weights()
        decoder = make_decoder(model, None, impl=self.settings.loading.model_impl, codec="auto")
        tokenizer = load_model(_SHARED_TOKENIZER, device="cpu", verify=False).tokenizer
        return LoadedModel(
            decoder=decoder,
            tokenizer=tokenizer,
            generation=GenerationDefaults(),
            spec=decoder.spec,
            name=self.settings.model,
            weight_bytes=weight_bytes(model),
        )

    @property
    def _dtype(self) -> "torch.dtype":
        import torch

        requested = self.settings.loading.dtype
        dtype: torch.dtype = getattr(torch, "bfloat16" if requested == "auto" else requested)
        return dtype

    @property
    def _device(self) -> "torch.device":
        import torch

        requested = self.settings.loading.device
        if requested == "auto":
            requested = "cuda" if torch.cuda.is_available() else "cpu"
        return torch.device(requested)

    @property
    def on_gpu(self) -> bool:
        """Whether the model runs on a GPU."""
        return self._device.type == "cuda"

    # ---- differences from a paper --------------------------------------------------------------

    @property
    def machine(self) -> str:
        """Display name of the machine that runs the model."""
        import torch

        if self.on_gpu:
            return torch.cuda.get_device_name(self._device)
        return str(hardware()["cpu"] or "CPU")

    def represents(self, names: Iterable[str]) -> str | None:
        """The paper's model with the shape of the loaded model, if it is one of these names."""
        if self.random_shape is not None:
            return self.random_shape if self.random_shape in names else None
        return next((name for name in names if is_shape(self.model.spec, name)), None)

    def differences(
        self, model: str = "", machine: str = "", others: Iterable[str] = ()
    ) -> tuple[str, ...]:
        """Differences from the paper's setting.

        Args:
            model: the paper's model, a name of `shapes`; "": the model has no effect.
            machine: the paper's machine; "": the machine has no effect.
            others: further differences; empty ones are omitted.
        """
        found = [self._model_difference(model)] if model else []
        found += [f"{self.machine} instead of {machine}"] if machine else []
        return tuple(text for text in (*found, *others) if text)

    def _model_difference(self, model: str) -> str:
        if self.random_shape is not None:
            return f"{self.model_name} instead of trained {model}: scores have no meaning"
        return "" if self.represents((model,)) else f"{self.model_name} instead of {model}"

    def own_row(self, names: tuple[str, ...]) -> str:
        """The paper's model whose rows get Quire's values: the loaded one, else the first."""
        return self.represents(names) or names[0]

    # ---- inputs --------------------------------------------------------------------------------

    @property
    def running(self) -> "RunningText":
        """Text for perplexity."""
        from benchmarks.common.cells import running_text

        return running_text(self.model, self.text)

    def context(self, wanted: int, quick: int) -> int:
        """A number of tokens: the wanted one, the quick one, or the model's context if smaller."""
        return min(quick if self.quick else wanted, self.model.spec.max_positions)

    def count(self, full: int, quick: int) -> int:
        """A number of prompts: `--samples` if given, else the item's."""
        return self.samples or (quick if self.quick else full)

    def once(self, key: str, make: Callable[[], Value]) -> Value:
        """A measurement that several items show; it runs once."""
        if key not in self._known:
            self._known[key] = make()
        return cast("Value", self._known[key])


def other_model_row(material: Material, label: str) -> str:
    """Reason of a row of another model of the paper."""
    return f"run with --model on {label}; this run has {material.model_name}"


def fewer(count: int, full: int, what: str) -> str:
    """The difference of a smaller number; "" if it is not smaller."""
    return f"{count:,} {what} instead of {full:,}" if count != full else ""
