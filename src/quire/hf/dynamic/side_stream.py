"""Where prompts are read in the background: on a GPU beside the steps, elsewhere between them."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class SideStream:
    """A CUDA stream of its own; on other devices nothing runs beside anything.

    Args:
        device: of the model.

    Attributes:
        overlaps: whether what is done `beside` may still run when it returns.
    """

    def __init__(self, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call]
        self.overlaps = self._stream is not None

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Do something behind all that was asked of the device, and beside what will be."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self, results: Iterable[Tensor] = ()) -> None:
        """Let what is asked of the device from now on wait for it.

        Args:
            results: made beside, and used from now on; their memory is kept until then.
        """
        if self._stream is None:
            return
        current = torch.cuda.current_stream(self._stream.device)
        current.wait_stream(self._stream)
        for result in results:
            result.record_stream(current)
