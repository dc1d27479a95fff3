"""What a user can say about a dynamic batch."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import no_type_check

from quire.errors import ConfigError
from quire.layout.options import MaybeSize, option
from quire.layout.sizes import parse_size

SYNC, ASYNC = "sync", "async"
DEVICE, HOST = "device", "host"


@no_type_check  # run-time type checks in tests must not answer before our own refusals
@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """How a dynamic batch runs.

    Attributes:
        batch_size: rows at most.
        batcher: a rule for dense rows of `quire.scheduler.batchers`, options and all.
        capacity_tokens: columns of the slab at most; None: the model's context.
        swap_space: for KV that was taken out, in bytes or as "64MiB"; None: no limit. What finds
            no room there is read again.
        scale_at: KV memory, in bytes or as "64MiB", from which rows are taken out; they come back
            when there is room. None: never.
        prefill: sync reads a prompt when there is a row for it; async reads ahead, at most
            `prefill_tokens` between two steps. Of the batchers that read ahead: baton_pd and
            baton_pd_best_fit; the others read a prompt when there is a row for it.
        prefill_tokens: see there.
        group_tokens: most tokens, pads counted, that are read together.
        queue: device or host: where prefilled queries wait, under the same two.
        clock: seconds; deadlines and times are on it.
    """

    batch_size: int = 8
    batcher: str = "baton_pd"
    capacity_tokens: int | None = None
    swap_space: MaybeSize = option(None)
    scale_at: MaybeSize = option(None)
    prefill: str = SYNC
    prefill_tokens: int = 64
    group_tokens: int = 256
    queue: str = DEVICE
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        for name in ("batch_size", "prefill_tokens", "group_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"expected {name} >= 1, got {getattr(self, name)}")
        if self.capacity_tokens is not None and self.capacity_tokens < 2:
            raise ConfigError(f"expected capacity_tokens >= 2, got {self.capacity_tokens}")
        for name, known in (("prefill", (SYNC, ASYNC)), ("queue", (DEVICE, HOST))):
            if getattr(self, name) not in known:
                raise ConfigError(
                    f"expected {name} to be {' or '.join(known)}, got {getattr(self, name)!r}"
                )
        for name in ("swap_space", "scale_at"):
            size = getattr(self, name)
            object.__setattr__(self, name, None if size is None else parse_size(size))
