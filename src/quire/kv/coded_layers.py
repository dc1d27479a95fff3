"""What encodes and decodes the pages of each layer, with constants that were measured for it."""

from dataclasses import replace

from quire.kernels.coded import CodedPages, CodedPlanes
from quire.kv.measured import KEY, VALUE, MeasuredConstants
from quire.kv.store import PageStore
from quire.layout.pages import PageClass


class CodedLayers:
    """Codecs of layers.

    Args:
        store: whose pages they are.
        measured: constants; None where no codec needs any.
    """

    def __init__(self, store: PageStore, measured: MeasuredConstants | None) -> None:
        self._store, self._measured = store, measured
        self._made: dict[tuple[PageClass, int], CodedPages] = {}

    def of(self, page_class: PageClass, layer: int) -> CodedPages | None:
        """What encodes and decodes a layer's pages; None where they hold plain numbers."""
        coded = self._store.views(page_class).coded
        if coded is None or self._measured is None:
            return coded
        if (page_class, layer) not in self._made:
            made = CodedPages(
                self._with_constants(coded.key, layer, KEY),
                self._with_constants(coded.value, layer, VALUE),
            )
            self._made[page_class, layer] = made
        return self._made[page_class, layer]

    def _with_constants(self, coded: CodedPlanes, layer: int, side: str) -> CodedPlanes:
        if self._measured is None or not coded.codec.spec.constants:
            return coded
        constants = self._measured.of(layer, side, self._store.device)
        return replace(coded, codec=replace(coded.codec, constants=constants))
