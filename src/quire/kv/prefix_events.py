"""What a prefix index tells whoever follows it: which blocks can be shared from now on, or no more.

A block is some whole pages of tokens, named by the hash of its chain: of all tokens up to its end,
with salt and policy. Whoever hears of every block knows which prompts find their beginning here.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

logger = logging.getLogger(__name__)


@runtime_checkable
class PrefixListener(Protocol):
    """Hears of blocks that enter and leave a prefix index. It must not take long."""

    def stored(
        self,
        block_hashes: Sequence[bytes],
        parent_hash: bytes | None,
        token_ids: Sequence[int],
        page_tokens: int,
    ) -> None:
        """Consecutive full blocks of one chain can be shared now.

        Args:
            block_hashes: of each block, in order.
            parent_hash: of the block before the first; None where the first begins the prompt.
            token_ids: of these blocks only, len(block_hashes) * page_tokens of them.
            page_tokens: tokens of a block.
        """

    def removed(self, block_hashes: Sequence[bytes]) -> None:
        """These blocks can be shared no more."""


class PrefixBroadcast:
    """Passes what one index tells to any number of listeners.

    A listener that raises is dropped, and the log says so: who watches must not stop who works.
    """

    def __init__(self) -> None:
        self._listeners: list[PrefixListener] = []

    def subscribe(self, listener: PrefixListener) -> None:
        """Tell `listener` everything from now on."""
        self._listeners.append(listener)

    def stored(
        self,
        block_hashes: Sequence[bytes],
        parent_hash: bytes | None,
        token_ids: Sequence[int],
        page_tokens: int,
    ) -> None:
        """See `PrefixListener.stored`."""
        self._tell(lambda who: who.stored(block_hashes, parent_hash, token_ids, page_tokens))

    def removed(self, block_hashes: Sequence[bytes]) -> None:
        """See `PrefixListener.removed`."""
        self._tell(lambda who: who.removed(block_hashes))

    def _tell(self, say: Callable[[PrefixListener], None]) -> None:
        for listener in tuple(self._listeners):
            try:
                say(listener)
            except Exception:
                self._listeners.remove(listener)
                logger.exception("%s hears of no more prefixes: it raised", type(listener).__name__)
