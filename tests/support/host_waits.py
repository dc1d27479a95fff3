"""Finds the operations of a step at which the CPU would wait for a device, on any machine.

The device is torch's "meta" device: its tensors have no data, so that reading them raises an error.
Copies to it do not raise; the mode records those that would wait on a CUDA device.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quire.models.adapter import TransformersDecoder
from quire.models.generation import GenerationDefaults
from quire.models.loader import LoadedModel
from quire.models.native_linear import matrix
from quire.models.observing import OutputProjections
from support import zoo

DEVICE = torch.device("meta")
READING = (
    torch.ops.aten._local_scalar_dense,
    torch.ops.aten.nonzero,
    torch.ops.aten.masked_select,
    torch.ops.aten.equal,
    torch.ops.aten.is_nonzero,
    torch.ops.aten.unique_dim,
    torch.ops.aten._unique2,
)


class HostWaits(TorchDispatchMode):
    """Records operations that wait for the device.

    Attributes:
        found: a description of each.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.found += _reads(func, args)
        out = func(*args, **kwargs)
        if isinstance(out, Tensor) and _copies(func, args, kwargs, out):
            self.found.append(f"{func} between devices")
        return out


def _reads(func: Any, args: tuple[Any, ...]) -> Iterator[str]:
    """Yield a description of a call that reads the data of a tensor on the device."""
    packet = func.overloadpacket
    if packet in READING and any(
        isinstance(arg, Tensor) and arg.device.type != "cpu" for arg in args
    ):
        yield str(func)
    if packet is torch.ops.aten.index and any(
        isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1]
    ):
        yield f"{func} with a mask"


def _copies(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> bool:
    """Whether a call copies between devices and waits for the copy.

    Numbers without dimensions are passed to kernels as arguments.
    """
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    tensors = [one for one in given.values() if isinstance(one, Tensor) and one.dim()]
    is_between = any(one.device.type != out.device.type for one in tensors)
    return is_between and not given.get("non_blocking", False)


@contextmanager
def recorded_waits() -> Iterator[list[str]]:
    """Record the operations that wait within the block."""
    with HostWaits() as mode:
        yield mode.found


class DatalessDecoder(TransformersDecoder):
    """A decoder on the "meta" device, whose RoPE cannot be probed."""

    def prepare_pre_rope(self) -> str | None:
        """See `Decoder.prepare_pre_rope`."""
        return "its weights have no data"

    def rotations(self, variant: int) -> None:
        """See `Decoder.rotations`."""

    def output_projections(self) -> OutputProjections:
        """See `Decoder.output_projections`."""
        attentions = [one for one in self.model.modules() if hasattr(one, "o_proj")]
        reads = {one.layer_idx: [partial(matrix, one.o_proj)] for one in attentions}
        return OutputProjections(reads, self.spec.heads)


def dataless(architecture: str) -> LoadedModel:
    """A zoo model on the "meta" device."""
    decoder = DatalessDecoder(zoo.build(architecture).to(DEVICE))
    return LoadedModel(
        decoder=decoder,
        tokenizer=None,
        generation=GenerationDefaults(),
        spec=decoder.spec,
        name=architecture,
        weight_bytes=0,
    )
