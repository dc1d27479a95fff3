"""A feature of the registry: how a user turns it on, and how a run shows that it has acted."""

from collections.abc import Callable
from dataclasses import dataclass

from composition.draft import AMPLE, Draft
from composition.ran import Ran


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """One feature.

    Attributes:
        name: in the table.
        group: heading in the table.
        option: how it is set.
        draw: adds the feature to a draft.
        acted: whether a run that ended with the right answers shows that the feature acted.
        alone_in: features with the same text here exclude each other, as two values of one option;
            "" for a feature that combines with all others of its group.
        only_with: groups whose features can be set together with this one; None: all.
        told: reason that the engine states for not using the feature, where it runs without it.
        never_with: features of these groups that cannot be set together with it.
        run: runs a draft and compares; None: the engine, in little memory and in ample memory.
    """

    name: str
    group: str
    option: str
    draw: Callable[[Draft], None]
    acted: Callable[[Ran], bool]
    alone_in: str = ""
    only_with: tuple[str, ...] | None = None
    never_with: tuple[str, ...] = ()
    told: Callable[[Ran], str | None] | None = None
    run: Callable[[Draft], Ran] | None = None

    def excludes(self, other: "Feature") -> bool:
        """Whether both are values of one option, or cannot be set together."""
        same = bool(self.alone_in) and self.alone_in == other.alone_in
        return same or not (self._takes(other) and other._takes(self))

    def _takes(self, other: "Feature") -> bool:
        taken = self.only_with is None or other.group in self.only_with
        return taken and other.name not in self.never_with


def setting(**values: object) -> Callable[[Draft], None]:
    """A `draw` that sets fields of a draft; dictionaries are merged into its own."""

    def draw(draft: Draft) -> None:
        for name, value in values.items():
            setattr(draft, name, _joined(name, getattr(draft, name), value))

    return draw


def _joined(name: str, own: object, value: object) -> object:
    """The value of a field that two features set."""
    if isinstance(own, dict):
        longest = [v["max_tokens"] for v in (own, value) if "max_tokens" in v]
        return own | value | ({"max_tokens": max(longest)} if longest else {})
    if name == "units":
        return value if own == AMPLE else tuple(sorted({*own, *value}))
    if name in ("times", "host_units", "stream_units"):
        return max(own, value)
    return value


def both(*draws: Callable[[Draft], None]) -> Callable[[Draft], None]:
    """A `draw` that does what several do."""

    def draw(draft: Draft) -> None:
        for one in draws:
            one(draft)

    return draw
