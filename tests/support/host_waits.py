"""Finds operations at which the CPU would wait for a device, with torch's "meta" device.

Reading its tensors raises; copies to it that would wait on a CUDA device are recorded.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quire.models.adapter import TransformersDecoder
from quire.models.loader import LoadedModel
from quire.models.native_linear import matrix
from quire.models.observing import OutputProjections
from support import zoo
from support.engines import loaded

DEVICE = torch.device("meta")
NAMES = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique_dim")
READING = tuple(getattr(torch.ops.aten, name) for name in (*NAMES, "_unique2"))


class HostWaits(TorchDispatchMode):
    """Records operations that wait for the device."""

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
    if packet in READING and any(isinstance(a, Tensor) and a.device.type != "cpu" for a in args):
        yield str(func)
    if packet is torch.ops.aten.index and any(
        isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1]
    ):
        yield f"{func} with a mask"


def _copies(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> bool:
    """Whether a call copies between devices and waits; scalars are arguments of kernels."""
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
        return "its weights have no data"

    def rotations(self, variant: int) -> None:
        """See `Decoder.rotations`."""

    def output_projections(self) -> OutputProjections:
        attentions = [one for one in self.model.modules() if hasattr(one, "o_proj")]
        reads = {one.layer_idx: [partial(matrix, one.o_proj)] for one in attentions}
        return OutputProjections(reads, self.spec.heads)


def dataless(architecture: str) -> LoadedModel:
    """A zoo model on the "meta" device."""
    return loaded(DatalessDecoder(zoo.build(architecture).to(DEVICE)), architecture)
