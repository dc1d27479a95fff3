"""The syntax of sparse attention: which pages of its lanes a decode row reads.

    quest:budget=10%                   a tenth of the pages, those with the highest scores
    quest:pages=32,recent=4,sinks=1    32 pages: the first, the newest 4, and 27 by score
    quest:budget=25%,dense_layers=0    in the first two layers too
    off                                all pages

The budget counts the pages that are read in any case, of which there may be more. A lane with at
most as many pages is read as a whole.
"""

import math
from dataclasses import dataclass

from quire.errors import ConfigError, UnknownName
from quire.layout import limits
from quire.layout.eviction import parse_policy
from quire.layout.kv_format import read_format
from quire.layout.model import ModelSpec

OFF, QUEST = "off", "quest"
RULES = (QUEST, OFF)
MAX_PAGES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseSpec:
    """The pages that the decode rows of a request read, in each KV head.

    Attributes:
        text: as written.
        pages: number of pages; None: `share` is set.
        share: fraction of a lane's pages, rounded up; None: `pages` is set.
        recent: newest pages, which are read in any case; the last of them has the row's own token.
        sinks: first pages, which are read in any case.
        dense_layers: first layers of the model, which read all pages.
    """

    text: str
    pages: int | None = None
    share: float | None = None
    recent: int = 4
    sinks: int = 1
    dense_layers: int = 2

    def __post_init__(self) -> None:
        if (self.pages is None) == (self.share is None):
            raise ConfigError(
                f"{self.text!r}: expected budget=10% (of the pages) or pages=32, one of them"
            )
        if self.share is not None and not 0 < self.share <= 1:
            raise ConfigError(
                f"{self.text!r}: expected a budget above 0% and up to 100% of the pages, got "
                f"{100 * self.share:g}%"
            )
        for name, least in (("recent", 1), ("sinks", 0), ("dense_layers", 0)):
            if not least <= getattr(self, name) <= MAX_PAGES:
                raise ConfigError(
                    f"{self.text!r}: expected {name} from {least} to {MAX_PAGES:,}, got "
                    f"{getattr(self, name)}"
                )
        if self.pages is not None and not self.min_pages <= self.pages <= MAX_PAGES:
            raise ConfigError(
                f"{self.text!r}: expected pages from {self.min_pages} (sinks, recent and one by "
                f"its score) to {MAX_PAGES:,}, got {self.pages}"
            )

    @property
    def min_pages(self) -> int:
        """Pages of the smallest budget: those that are read in any case, and one by its score."""
        return self.sinks + self.recent + 1

    def pages_read(self, held: int) -> int:
        """Return the pages that are read of a lane with `held` pages; 0: all of them."""
        budget = self.pages
        if budget is None:
            assert self.share is not None, "see `__post_init__`"
            budget = max(self.min_pages, math.ceil(self.share * held - 1e-9))
        return budget if budget < held else 0


def refuse_sparse(model: ModelSpec, codec: str, spec: SparseSpec) -> None:
    """Refuse models and filled KV codecs whose pages have no bounds of keys, or that read all.

    Raises:
        UnsoundCombination: the first limit that applies.
    """
    for is_limited, limit in (
        (bool(read_format(codec).key.constants), limits.SPARSE_CALIBRATED),
        (any(heads.latent is not None for heads in model.heads), limits.SPARSE_LATENT),
        (not any(layer.stores_all for layer in model.layers), limits.SPARSE_WINDOWS),
        (
            not any(layer.stores_all for layer in model.layers[spec.dense_layers :]),
            limits.SPARSE_DENSE_LAYERS,
        ),
    ):
        if is_limited:
            raise limits.refused(limit, codec=codec, dense_layers=spec.dense_layers)


def parse_sparse(text: str) -> SparseSpec | None:
    """Parse a rule of sparse attention; None for `off`.

    Raises:
        UnknownName: an unknown rule or option.
        ConfigError: a value is invalid, or no budget is given.
    """
    parsed = parse_policy(text, "sparse attention")
    if parsed.name not in RULES:
        raise UnknownName("sparse attention", parsed.name, RULES)
    if parsed.name == OFF:
        if parsed.options:
            raise ConfigError(f"expected off without options, got {text!r}")
        return None
    options = dict(parsed.options)
    share, known = options.pop("budget", None), ("pages", "recent", "sinks", "dense_layers")
    for name in options:
        if name not in known:
            raise UnknownName("option of quest", name, ("budget", *known))
    try:
        numbers = {name: int(value) for name, value in options.items()}
    except ValueError:
        raise ConfigError(f"expected whole numbers of {', '.join(known)}, got {text!r}") from None
    return SparseSpec(text=text, share=None if share is None else _share(share, text), **numbers)


def _share(value: str, text: str) -> float:
    try:
        share = float(value.removesuffix("%")) / (100 if value.endswith("%") else 1)
    except ValueError:
        share = math.nan
    if not math.isfinite(share):
        raise ConfigError(f"{text!r}: expected a budget such as 10% or 0.1, got {value!r}")
    return share
