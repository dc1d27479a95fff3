"""The ranks that share one model: each has some heads of every layer.

Collectives are by torch.distributed: gloo on a CPU, nccl between CUDA devices. A `TorchGroup` has a
process group of its own, not torch's global default group: a program may have a default group, and
one process may open several engines.
"""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch import distributed as dist

from quire.errors import ConfigError, RankFailed

LOCAL_HOST = "127.0.0.1"  # all ranks run on one machine; no port is open to the network


@runtime_checkable  # for the shape checks in tests
class TensorGroup(Protocol):
    """Collectives of the ranks of one model. All ranks make the same calls in the same order."""

    @property
    def rank(self) -> int:
        """Number of this rank, from 0."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over all ranks, bit-identical on every rank.

        Args:
            tensor: of the same shape and type on all ranks; may be overwritten.
        """
        ...

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, in the order of the ranks."""

    def union(self, mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return a mask that is True where the mask of any rank is."""

    def least(self, number: int) -> int:
        """Return the smallest number of any rank."""

    def meet(self) -> None:
        """Wait until all ranks have called this. For phases of very different duration: loading."""
        ...


class OneRank:
    """The group of a model that runs in one process: all collectives return their argument."""

    rank, size = 0, 1

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor

    def gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor]

    def union(self, mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
        return mask

    def least(self, number: int) -> int:
        return number

    def meet(self) -> None: ...


ONE_RANK = OneRank()


@runtime_checkable  # for the type checks in tests
class _Backend(Protocol):
    """`ProcessGroupGloo` and `ProcessGroupNCCL`, which have no common base class in Python."""

    def rank(self) -> int: ...

    def size(self) -> int: ...

    def allreduce(self, tensors: list[Tensor], opts: dist.AllreduceOptions) -> dist.Work: ...

    def allgather(self, out: list[list[Tensor]], tensors: list[Tensor]) -> dist.Work: ...


class TorchGroup:
    """A process group; the device of its tensors is the CPU for gloo."""

    def __init__(self, group: _Backend, device: torch.device, meet: Callable[[], None]) -> None:
        self._group, self._device, self._meet = group, device, meet
        self.rank, self.size = group.rank(), group.size()

    def sum(self, tensor: Tensor) -> Tensor:
        """See `TensorGroup.sum`. Half-precision numbers are added in float32 on a CPU."""
        wide = tensor.to(self._device)
        if self._device.type == "cpu" and tensor.dtype in (torch.float16, torch.bfloat16):
            wide = wide.float()
        wide = wide.contiguous()
        self._run(lambda: self._group.allreduce([wide], dist.AllreduceOptions()))
        return wide.to(tensor.device, tensor.dtype)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        own = tensor.to(self._device).contiguous()
        sent = own.view(torch.uint8) if own.dtype == torch.bool else own
        found = [torch.empty_like(sent) for _ in range(self.size)]
        self._run(lambda: self._group.allgather([found], [sent]))
        return [one.view(own.dtype).to(tensor.device) for one in found]

    def union(self, mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
        found = self.gather(torch.from_numpy(np.ascontiguousarray(mask)))
        united: NDArray[np.bool_] = torch.stack(found).any(dim=0).numpy()
        return united

    def least(self, number: int) -> int:
        return int(torch.stack(self.gather(torch.tensor([number]))).min())

    def meet(self) -> None:
        self._meet()

    def _run(self, start: Callable[[], dist.Work]) -> None:
        try:
            start().wait()
        except RuntimeError as error:  # a peer has closed its connection, or the time is over
            raise RankFailed(f"rank {self.rank}: a collective failed: {_first_line(error)}") from (
                error
            )


def open_group(
    rank: int,
    size: int,
    device: torch.device,
    *,
    rendezvous: Path,
    timeout_s: float,
    meet: Callable[[], None],
) -> TorchGroup:
    """Connect to the other ranks."""
    store = dist.FileStore(str(rendezvous), size)  # type: ignore[attr-defined]
    limit = timedelta(seconds=timeout_s)
    try:
        if device.type == "cuda":
            return TorchGroup(_nccl(store, rank, size, limit), device, meet)
        return TorchGroup(_gloo(store, rank, size, limit), torch.device("cpu"), meet)
    except RuntimeError as error:
        raise RankFailed(f"rank {rank} could not connect: {_first_line(error)}") from error


def _gloo(store: Any, rank: int, size: int, limit: timedelta) -> _Backend:
    if not dist.is_available() or not dist.is_gloo_available():
        raise ConfigError(
            "tensor parallelism on a CPU needs a torch with gloo, and this torch has none; use "
            "tensor_parallel_size=1"
        )
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = limit
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOCAL_HOST)]
    return cast(_Backend, dist.ProcessGroupGloo(store, rank, size, options))


def _nccl(store: Any, rank: int, size: int, limit: timedelta) -> _Backend:
    if not dist.is_available() or not dist.is_nccl_available():
        raise ConfigError(
            "tensor parallelism on CUDA devices needs a torch with nccl, and this torch has none; "
            "use tensor_parallel_size=1"
        )
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    return cast(_Backend, dist.ProcessGroupNCCL(store, rank, size, options))


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", maxsplit=1)[0]
