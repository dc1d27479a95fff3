"""Loading of a model folder's weight files into a Transformers model."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from quire.errors import ModelError, UnsupportedModel
from quire.models.foreign import foreign_code
from quire.models.linear_weights import ReorderedLinear
from quire.models.native_linear import PackedLinear
from quire.models.stored import QuantizedLayers, StoredTensor, is_ignored, layer_list, spellings
from quire.models.support import model_class


def read_model(
    folder: Path,
    config: PreTrainedConfig,
    stored: Mapping[str, StoredTensor],
    *,
    dtype: torch.dtype | None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Build the model on the CPU with every weight from the folder."""
    with foreign_code(f"the weights in {folder} cannot be loaded"), silence():
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype="auto" if dtype is None else dtype,
            attn_implementation="eager",
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            trust_remote_code=trust_remote_code,
        )
    model: PreTrainedModel = loaded[0]
    check_loaded(model, loaded[1], stored, folder)
    return model


def read_coded_model(
    folder: Path,
    config: PreTrainedConfig,
    stored: Mapping[str, StoredTensor],
    coded: QuantizedLayers,
    *,
    dtype: torch.dtype | None,
) -> PreTrainedModel:
    """Build the model on the CPU from a checkpoint with coded linear layers."""
    known = model_class(config)
    if known is None:
        raise UnsupportedModel(
            f"{coded.method} checkpoints of models with their own Python code cannot be decoded; "
            "use a checkpoint in bfloat16 or float16"
        )
    stored_dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float16
    wanted = stored_dtype if dtype is None else dtype
    with foreign_code(f"the weights in {folder} cannot be loaded"), silence():
        loaded: Any = known.from_pretrained(
            None,
            config=config,
            state_dict=coded.read(folder, stored, wanted),
            dtype=wanted,
            attn_implementation="eager",
            output_loading_info=True,
        )
    model: PreTrainedModel = loaded[0]
    check_loaded(model, loaded[1], coded.headers(stored), folder)
    return model


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of all parameters, packed weights and buffers, shared ones counted once."""
    tensors = [*model.parameters(), *model.buffers()]
    reordered = sum(m.reordered_bytes for m in model.modules() if isinstance(m, ReorderedLinear))
    packed = {
        tensor.data_ptr(): tensor.nbytes
        for module in model.modules()
        if isinstance(module, PackedLinear)
        for tensor in module.product.tensors
    }
    return sum(packed.values()) + reordered + sum(tensor.nbytes for tensor in tensors)


@contextmanager
def silence() -> Iterator[None]:
    """Show no progress bars and no reports of keys: `check_loaded` reports mismatches."""
    shown = transformers_logging.is_progress_bar_enabled()
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if shown:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


# Checks after loading: every parameter has its weights, and all weights of a layer were loaded.

# Tables that old versions of Transformers stored and newer ones compute.
_COMPUTED = r"\.(inv_freq|original_inv_freq|cos_cached|sin_cached|masked_bias|position_ids)$"


def check_loaded(
    model: PreTrainedModel,
    info: Mapping[str, Any],
    stored: Mapping[str, StoredTensor],
    folder: Path,
) -> None:
    """Compare the loaded parameters with the stored tensors.

    Args:
        model: model with loaded weights.
        info: `missing_keys` and `unexpected_keys`, as Transformers reports them; keys that the
            model class declares as ignorable are absent.
        stored: see `read_headers`.
        folder: folder of the weights.
    """
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelError(
            f"{folder} has no weights for {_listed(missing)}; they would be random: "
            "fetch the folder again, or check that config.json belongs to it"
        )
    if getattr(model, "hf_quantizer", None) is not None:
        return  # codes are integers, and scales have no parameter
    _check_unexpected(model, sorted(info["unexpected_keys"]), folder)
    unexpected = set(info["unexpected_keys"])
    unused = [*(model._keys_to_ignore_on_load_unexpected or ()), _COMPUTED]
    buffers = {name for name, _ in nn.Module.named_buffers(model)}
    for name, tensor in stored.items():
        if not tensor.is_integer or name in unexpected or is_ignored(name, unused):
            continue
        if not any(spelling in buffers for spelling in spellings(model, name)):
            raise ModelError(
                f"{folder} stores {name} as integers ({tensor.dtype}), but config.json has no "
                "'quantization_config' to decode them; download a checkpoint in bfloat16, "
                "float16 or float32, or its complete config.json"
            )


def check_finite(model: nn.Module) -> None:
    """Check that all parameters are finite."""
    for name, parameter in model.named_parameters():
        found = _not_finite(parameter.detach())
        if found:
            narrow = parameter.dtype == torch.float16 and found == "inf"
            advice = (
                "the values exceed the range of float16: load with dtype=bfloat16 or float32"
                if narrow
                else "fetch the folder again"
            )
            raise ModelError(f"weights contain {found} in {name}; {advice}")


def _not_finite(values: Tensor) -> str:
    if not values.numel() or not values.is_floating_point():
        return ""
    if values.element_size() == 1:  # float8 has no minimum
        values = values.float()
    extremes = torch.stack(torch.aminmax(values))
    if bool(extremes.isnan().any()):
        return "NaN"
    return "inf" if bool(extremes.isinf().any()) else ""


def _check_unexpected(model: PreTrainedModel, unexpected: Iterable[str], folder: Path) -> None:
    modules = {name for name, _ in nn.Module.named_modules(model)}
    left_out = []
    for name in unexpected:
        owners = filter(None, (name.rpartition(".")[0], layer_list(name)))
        is_of_model = any(s in modules for owner in owners for s in spellings(model, owner))
        if is_of_model and not is_ignored(name, [_COMPUTED]):
            left_out.append(name)
    if left_out:
        raise ModelError(
            f"{folder} has weights for {_listed(left_out)}, but the model that config.json "
            "describes has no such parameters, so its output would be wrong; check that "
            "config.json belongs to these weights"
        )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"
