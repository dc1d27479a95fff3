"""Where the bytes of pages are: the seam between bookkeeping and tensors.

Calls take effect in the order they are made, on a CPU as on a CUDA stream.
"""

from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from quire.kv.pages import PageNumbers
from quire.layout.pages import PageClass


@runtime_checkable
class PageBytes(Protocol):
    """Acts on whole pages and on slots, given as (page, offset in the page)."""

    def copy_pages(self, page_class: PageClass, source: PageNumbers, target: PageNumbers) -> None:
        """Copy whole pages, `source[i]` onto `target[i]`."""

    def clear_pages(self, page_class: PageClass, pages: PageNumbers) -> None:
        """Zero whole pages."""

    def move_slots(
        self,
        page_class: PageClass,
        source: tuple[PageNumbers, NDArray[np.int64]],
        target: tuple[PageNumbers, NDArray[np.int64]],
    ) -> None:
        """Copy slots, each given as (page, offset in the page), keys, values and positions.

        A slot can be source of one move and target of another: all are read before any is written.
        """

    def read_pages(self, page_class: PageClass, pages: PageNumbers) -> object:
        """The bytes of whole pages, in a form `write_pages` takes back."""

    def write_pages(self, page_class: PageClass, pages: PageNumbers, payload: object) -> None:
        """Put bytes that were read back into (other) pages."""


class NoBytes:
    """A `PageBytes` without bytes, for simulations and schedules."""

    def copy_pages(self, page_class: PageClass, source: PageNumbers, target: PageNumbers) -> None:
        """Nothing to copy."""

    def clear_pages(self, page_class: PageClass, pages: PageNumbers) -> None:
        """Nothing to zero."""

    def move_slots(
        self,
        page_class: PageClass,
        source: tuple[PageNumbers, NDArray[np.int64]],
        target: tuple[PageNumbers, NDArray[np.int64]],
    ) -> None:
        """Nothing to move."""

    def read_pages(self, page_class: PageClass, pages: PageNumbers) -> object:
        """Nothing to read."""
        return None

    def write_pages(self, page_class: PageClass, pages: PageNumbers, payload: object) -> None:
        """Nothing to write."""
