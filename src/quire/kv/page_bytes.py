"""The seam between page bookkeeping and tensors: operations on the bytes of pages.

Calls take effect in call order, on a CPU as on a CUDA stream.
"""

from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from quire.kv.pages import PageNumbers
from quire.layout.pages import PageClass


@runtime_checkable
class PageBytes(Protocol):
    """Operations on whole pages and on slots; a slot is (page, offset in the page)."""

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
        """A slot is (page, offset); all sources are read before any target is written."""

    def read_pages(self, page_class: PageClass, pages: PageNumbers) -> object:
        """Read the bytes of whole pages, in a form that `write_pages` accepts."""

    def write_pages(self, page_class: PageClass, pages: PageNumbers, payload: object) -> None:
        """Write bytes from `read_pages` into the same or other pages."""


class NoBytes:
    """A `PageBytes` without bytes, for simulations and schedules; every method does nothing."""

    def copy_pages(
        self, page_class: PageClass, source: PageNumbers, target: PageNumbers
    ) -> None: ...

    def clear_pages(self, page_class: PageClass, pages: PageNumbers) -> None: ...

    def move_slots(
        self,
        page_class: PageClass,
        source: tuple[PageNumbers, NDArray[np.int64]],
        target: tuple[PageNumbers, NDArray[np.int64]],
    ) -> None: ...

    def read_pages(self, page_class: PageClass, pages: PageNumbers) -> object:
        return None

    def write_pages(self, page_class: PageClass, pages: PageNumbers, payload: object) -> None: ...
