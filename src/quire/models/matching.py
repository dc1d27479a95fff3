"""After loading: every parameter has its weights, and no weights of a layer were left out."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from quire.errors import ModelError
from quire.models.shapes import is_ignored, layer_list, spellings
from quire.models.stored import StoredTensor

# Tables that old versions of Transformers stored and newer ones compute.
_COMPUTED = r"\.(inv_freq|original_inv_freq|cos_cached|sin_cached|masked_bias|position_ids)$"


def check_loaded(
    model: PreTrainedModel,
    info: Mapping[str, Any],
    stored: Mapping[str, StoredTensor],
    folder: Path,
) -> None:
    """Compare what was loaded with what is stored.

    Args:
        model: with its weights.
        info: `missing_keys` and `unexpected_keys`, as Transformers reports them; it leaves out what
            the model class declares as ignorable.
        stored: see `read_headers`.
        folder: where the weights are.

    Raises:
        ModelError: a parameter has no stored weights, stored weights have no parameter, or weights
            are stored as integers without a quantization that explains it.
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
    _check_integers(model, set(info["unexpected_keys"]), stored, folder)


def check_finite(model: nn.Module) -> None:
    """Read every parameter once.

    Raises:
        ModelError: one holds NaN or an infinity; names it.
    """
    for name, parameter in model.named_parameters():
        found = _not_finite(parameter.detach())
        if found:
            narrow = parameter.dtype == torch.float16 and found == "inf"
            advice = (
                "larger values than float16 has: load with dtype=bfloat16 or float32"
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
            f"{folder} has weights for {_listed(left_out)}, and the model that config.json "
            "describes has no such parameters; without them its answers would be wrong: check that "
            "config.json belongs to these weights"
        )


def _check_integers(
    model: PreTrainedModel,
    unexpected: set[str],
    stored: Mapping[str, StoredTensor],
    folder: Path,
) -> None:
    unused = [*(model._keys_to_ignore_on_load_unexpected or ()), _COMPUTED]
    buffers = {name for name, _ in nn.Module.named_buffers(model)}
    for name, tensor in stored.items():
        if not tensor.is_integer or name in unexpected or is_ignored(name, unused):
            continue
        if not any(spelling in buffers for spelling in spellings(model, name)):
            raise ModelError(
                f"{folder} stores {name} as integers ({tensor.dtype}), and config.json has no "
                "'quantization_config' that says what they mean: fetch a checkpoint in bfloat16, "
                "float16 or float32, or its whole config.json"
            )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"
