"""Replaces the layers of a model on a CPU by layers on packed weights.

The replaced weights leave the resident memory. Safetensors maps a weight file and returns views of
it. The mapping lasts as long as one view, and every page that was read stays in the resident memory
of the process. A model whose weights were packed would take the bytes of both copies, because a
norm or an embedding keeps the mapping.
"""

import ctypes
import mmap
import sys
from bisect import bisect_right
from collections.abc import Iterable
from operator import itemgetter
from pathlib import Path
from typing import TypeGuard, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from quire.kernels.native.linear import INNER_MULTIPLES, Products, can_pack
from quire.models.native_linear import (
    KINDS,
    PackedEmbedding,
    PackedExperts,
    can_pack_experts,
    matrix,
    pack_linear,
)

_MAPS = Path("/proc/self/maps")


class MappedFiles:
    """The memory ranges of this process that are mapped files; none except on Linux."""

    def __init__(self) -> None:
        lines = _MAPS.read_text("utf-8", "surrogateescape").splitlines() if _MAPS.exists() else ()
        found = (_file_range(line) for line in lines)
        self._ranges = sorted(each for each in found if each is not None)

    def hold(self, tensor: Tensor) -> bool:
        if tensor.device.type != "cpu" or not tensor.nbytes:
            return False
        start = tensor.data_ptr()
        number = bisect_right(self._ranges, start, key=itemgetter(0)) - 1
        return number >= 0 and start + tensor.nbytes <= self._ranges[number][1]

    def release_pages(self, tensors: Iterable[Tensor]) -> None:
        """Remove the pages of these tensors from resident memory; the next access reads the file.

        Tensors that are in no mapped file are ignored. The caller holds the tensors: a freed range
        may hold other objects.
        """
        for tensor in tensors:
            if tensor.is_contiguous() and self.hold(tensor):
                _release_pages(tensor.data_ptr(), tensor.nbytes)

    @torch.no_grad()
    def copy_weights(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            if self.hold(parameter):
                parameter.data = parameter.detach().clone()


def trim_free_memory() -> None:
    """Return freed memory to the system, if the C library can (glibc).

    Small packed weights lie between freed ones, which glibc would keep otherwise.
    """
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)


def _file_range(line: str) -> tuple[int, int] | None:
    fields = line.split(maxsplit=5)  # range, permissions, offset, device, inode, path
    if len(fields) < 6 or not fields[5].startswith("/"):
        return None
    start, end = fields[0].split("-")
    return int(start, 16), int(end, 16)


def _release_pages(start: int, num_bytes: int) -> None:
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE  # pages that no other tensor shares
    end = (start + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > first:
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED)


def pack_linears(
    model: nn.Module,
    products: Products,
    left_alone: Iterable[nn.Module] = (),
    codec: str | None = None,
) -> None:
    """Replace the linear layers of a model on a CPU by packed layers.

    Layers are replaced one at a time, so the extra memory is that of the largest weight. A head
    that shares its weight with an embedding is packed too, and the embedding reads the packed
    weight. Not replaced: other shared weights, layers derived from `nn.Linear`, layers with hooks,
    and layers whose input elements do not fill the units of a packed weight. Experts of a mixture
    are packed if they are quantized.
    """
    alone = {id(part) for module in left_alone for part in module.modules()}
    packable, embeddings = _packable_layers(model, codec)
    places = _places(model)
    queue = [layer for layer in packable if id(layer) not in alone]
    packable.clear()
    head, files = output_head(model), MappedFiles()
    while queue:  # hold no reference to a plain layer: each is freed before the next is packed
        layer = queue.pop(0)
        weights = [weight.detach() for weight in layer.parameters()]
        if not isinstance(layer, (nn.Linear, Conv1D)):
            assert codec is not None, "experts are packed in a codec"
            _replace(places.pop(layer), PackedExperts(layer, products, codec))
        else:
            kind = head_codec(codec) if layer is head else codec
            packed = pack_linear(layer, products, kind)
            _replace(places.pop(layer), packed)
            if layer in embeddings:
                embedding = PackedEmbedding(packed.packed, layer.weight.dtype)
                _replace(places.pop(embeddings.pop(layer)), embedding)
        files.release_pages(weights)
        if layer is head:
            head = None
        del layer, weights


def output_head(model: nn.Module) -> nn.Module | None:
    """The output head of a model; None if it has none."""
    if not isinstance(model, PreTrainedModel):
        return None
    found: object = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return found if isinstance(found, nn.Module) else None


def head_codec(codec: str | None) -> str | None:
    """The codec of the output head's weight, for a codec of the other layers."""
    return None if codec is None else "int8"


def codec_refusal(model: nn.Module, codec: str) -> str | None:
    """Return the reason why the weights of a model cannot be quantized; None if they can."""
    packable, _ = _packable_layers(model, codec)
    packed = set(packable)
    for name, module in model.named_modules():
        if module not in packed and (reason := _unpackable(module, codec)):
            return f"{name} {reason}"
    return None if packable else "it has no linear layers"


def _unpackable(module: nn.Module, codec: str) -> str | None:
    """The reason why a module with weights is not packed.

    None for embeddings, norms, routers, and convolutions, which have a few weights per channel.
    """
    if isinstance(module, nn.Conv1d):
        return None
    if type(module) in (nn.Linear, Conv1D):
        linear = cast("nn.Linear | Conv1D", module)
        inner, multiple = matrix(linear).shape[1], INNER_MULTIPLES[codec]
        if inner % multiple:
            return f"has {inner} inputs, and {codec} weights need a multiple of {multiple}"
        if linear.weight.dtype not in KINDS:
            return f"has weights of {linear.weight.dtype}"
        return "shares its weight with other modules than an embedding, or has hooks"
    if isinstance(module, nn.Linear) or hasattr(module, "in_features"):
        return f"is a {type(module).__name__}, not a plain linear layer"
    stacked = [name for name, one in module.named_parameters(recurse=False) if one.ndim > 2]
    return f"is a {type(module).__name__} with stacked weights ({stacked[0]})" if stacked else None


def _packable_layers(
    model: nn.Module, codec: str | None
) -> tuple[list[nn.Module], dict[nn.Module, nn.Module]]:
    """Layers to pack in the order of the model, and the embeddings that share a layer's weight."""
    owners: dict[int, set[nn.Module]] = {}
    for module in model.modules():
        for weight in module.parameters(recurse=False):
            owners.setdefault(id(weight), set()).add(module)
    packable: list[nn.Module] = []
    embeddings: dict[nn.Module, nn.Module] = {}
    for module in model.modules():
        if codec is not None and can_pack_experts(module, codec) and not _has_hooks(module):
            packable.append(module)
        elif _is_packable(module, codec):
            others = owners[id(module.weight)] - {module}
            if len(others) == 1 and _is_embedding(*others):
                embeddings[module] = others.pop()
            if not others:
                packable.append(module)
    return packable, embeddings


def _places(model: nn.Module) -> dict[nn.Module, list[tuple[nn.Module, str]]]:
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        for name, child in parent._modules.items():  # named_children() skips second names
            if child is not None:
                places.setdefault(child, []).append((parent, name))
    return places


def _replace(places: Iterable[tuple[nn.Module, str]], module: nn.Module) -> None:
    for parent, name in places:
        setattr(parent, name, module)


def _is_embedding(module: nn.Module) -> bool:
    return type(module) is nn.Embedding and module.max_norm is None and not _has_hooks(module)


def _is_packable(module: nn.Module, codec: str | None) -> TypeGuard[nn.Linear | Conv1D]:
    if type(module) not in (nn.Linear, Conv1D):
        return False
    linear = cast("nn.Linear | Conv1D", module)
    return (
        linear.weight.ndim == 2  # weights of offloaded layers are empty
        and linear.weight.dtype in KINDS
        and linear.weight.device.type in ("cpu", "meta")
        and can_pack(matrix(linear).shape[1], codec or KINDS[linear.weight.dtype])
        and not _has_hooks(linear)
    )


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)
