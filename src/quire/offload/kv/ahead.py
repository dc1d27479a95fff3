"""First layers of offloaded prefixes, loaded at the end of a step for the next one.

    step 1    ... | attend L-2 | attend L-1 | sampling | step 2  | attend 0 | attend 1
    transfer               | layer 0  | layer 1                           | layer 2 | layer 3

After the attention of the last layers, their staging slots are free. The next step loads only what
differs: pages of other columns, if its split has moved, and other sequences.
"""

import itertools
from collections.abc import Mapping, Sequence

from quire.offload.swap.transfer import Transfer

Run = tuple[int, int]
"""First page, counted in its layer, and number of pages."""


class LoadedAhead:
    """Copies for the next step. Bookkeeping that moves or frees staging pages waits for them."""

    def __init__(self) -> None:
        self._pages: dict[tuple[int, int], tuple[object, dict[Run, Transfer]]] = {}
        self._activations: dict[
            tuple[str, int, int], tuple[Mapping[int, range], Sequence[Transfer]]
        ] = {}

    def add(self, page_group: object, layer: int, run: Run, transfer: Transfer) -> None:
        """Add pages in transfer to their staging slot.

        Args:
            page_group: their page group; compared by identity.
            layer: index of the layer in its lane group.
            run: first page, counted in the layer, and number of pages.
            transfer: their copy.
        """
        key = id(page_group), layer
        self._pages.setdefault(key, (page_group, {}))[1][run] = transfer

    def take(self, page_group: object, layer: int) -> Mapping[Run, Transfer]:
        """Return the copies of a layer of a page group, by run; its staging is used from now on."""
        found = self._pages.pop((id(page_group), layer), None)
        return {} if found is None else found[1]

    def add_activations(
        self,
        group: str,
        batch: int,
        layer: int,
        rows: Mapping[int, range],
        copies: Sequence[Transfer],
    ) -> None:
        """Add activations in transfer to the staging of a batch.

        Args:
            group: name of the lane group.
            batch: index of the batch in the step.
            layer: index of the layer in the group.
            rows: slots of each sequence, in the order of the staging.
            copies: copies of the chunks, in order.
        """
        self._activations[group, batch, layer] = dict(rows), copies

    def take_activations(
        self, group: str, batch: int, layer: int, rows: Mapping[int, range]
    ) -> Sequence[Transfer] | None:
        """Return the copies of these slots; None if others are in the staging."""
        found = self._activations.pop((group, batch, layer), None)
        if found is None or list(found[0].items()) != list(rows.items()):
            return None
        return found[1]

    def forget_activations(self) -> None:
        """Drop the activations, because slots were moved or freed; their copies have ended."""
        self._wait_for_activations()
        self._activations.clear()

    def finalize(self) -> None:
        """Wait for all copies, which stay valid."""
        for _, copies in self._pages.values():
            for transfer in copies.values():
                transfer.exception()
        self._wait_for_activations()

    def clear(self) -> None:
        """Wait for all copies and drop them, because other data goes to their staging slots."""
        self.finalize()
        self._pages.clear()
        self._activations.clear()

    def _wait_for_activations(self) -> None:
        copies = (transfers for _, transfers in self._activations.values())
        for transfer in itertools.chain.from_iterable(copies):
            transfer.exception()

    def retain(self, page_groups: Sequence[object]) -> None:
        """Drop the pages of page groups that no sequence holds."""
        held = {id(page_group) for page_group in page_groups}
        self._pages = {key: kept for key, kept in self._pages.items() if id(kept[0]) in held}
