"""Run to completion: a batch is read together, padded, and the next begins when all have ended."""

from quire.hf.dynamic.query import Query
from quire.hf.dynamic.rules.base import BatchRule, BatchView
from quire.hf.dynamic.rules.registry import batch_rule


@batch_rule("static")
class Static(BatchRule):
    """What `model.generate` does with a batch; answers are given out as they end."""

    shapes = True
    runs_to_end = True

    def open_rows(self, view: BatchView) -> int:
        """All, once no row goes on."""
        return 0 if view.live else view.size

    def next_group(self, view: BatchView) -> list[Query]:
        """As many as fit."""
        return list(view.waiting[: view.size])
