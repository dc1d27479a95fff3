"""What a prefix index tells whoever follows it: which pages can be shared from now on, or no more.

A page is named by the hash of its chain: of all tokens up to its end, with salt and policy. So
whoever hears of every page knows which prompts would find their beginning here.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable


@runtime_checkable
class PrefixListener(Protocol):
    """Hears of pages that enter and leave a prefix index. It must neither raise nor take long."""

    def stored(
        self,
        block_hashes: Sequence[bytes],
        parent_hash: bytes | None,
        token_ids: Sequence[int],
        page_tokens: int,
    ) -> None:
        """Consecutive full pages of one chain can be shared now.

        Args:
            block_hashes: of each page, in order.
            parent_hash: of the page before the first; None where the first begins the prompt.
            token_ids: of these pages only, len(block_hashes) * page_tokens of them.
            page_tokens: tokens of a page.
        """

    def removed(self, block_hashes: Sequence[bytes]) -> None:
        """These pages can be shared no more."""

    def cleared(self) -> None:
        """No page can be shared any more."""
