"""A view in which every query head is a lane, so that each head is scored separately."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from jaxtyping import Float, Int
from torch import Tensor

from quire.layout.statistics import OfWeights, QueryMoments, QueryRing, Statistic
from quire.policies.view import KVView, SlotReader


def apart(statistics: Sequence[Statistic]) -> tuple[Statistic, ...]:
    """Return the statistics that score query heads separately."""
    each = (s.each() if isinstance(s, OfWeights) else s for s in statistics)
    return tuple(dict.fromkeys(each))


def by_query_head(view: KVView, statistics: Sequence[Statistic]) -> KVView:
    """Return the same sequence with a lane for each query head, layer-major.

    A rule applied to this view scores each query head separately, without reduction over a group.

    Args:
        view: a view with the statistics that `apart` returns.
        statistics: statistics that the rule declares.

    Raises:
        PolicyError: the view was built without a statistic.
    """
    heads = object.__new__(_QueryHeads)
    vars(heads).update(
        {name: number for name, number in vars(view).items() if name in _COPIED},
        next_position=_by_head(view.next_position, view.group),
        prompt_tokens=_by_head(view.prompt_tokens, view.group),
        of_lanes=view,
        heads_per_layer=view.heads_per_layer * view.group,
        statistics={s.name: _of_heads(view, s) for s in statistics},
        slots=None if view.slots is None else _Repeated(view.slots, view.group),
        group=1,
    )
    return heads


class _QueryHeads(KVView):
    """A lane for each query head; positions are repeated on first use: many rules need none."""

    of_lanes: KVView | None = None  # None for a copy with positions of its own

    @property
    def shape(self) -> tuple[int, ...]:
        if self.of_lanes is None:
            return super().shape
        lanes, slots = self.of_lanes.shape
        return lanes * self.of_lanes.group, slots

    @cached_property
    def positions(self) -> Int[Tensor, "lane slot"]:
        assert self.of_lanes is not None, "a copy has positions"
        return self.of_lanes.positions.repeat_interleave(self.of_lanes.group, dim=0)


_COPIED = ("layers", "head_dim", "layer_scales", "alibi", "rotation", "projection", "breaches")


def _by_head(number: int | Tensor, group: int) -> int | Tensor:
    return number if isinstance(number, int) else number.repeat_interleave(group, dim=0)


def first_heads(view: KVView) -> KVView:
    """Return a view of each layer's first lane, for data that all heads of a layer share."""
    next_position, prompt_tokens = (
        count if isinstance(count, int) else view.first_heads(count)
        for count in (view.next_position, view.prompt_tokens)
    )
    alibi = view.alibi
    if alibi is not None:
        alibi = replace(alibi, slopes=alibi.slopes[: len(alibi.slopes) // view.heads_per_layer])
    return replace(
        view,
        alibi=alibi,
        positions=view.first_heads(view.positions),
        next_position=next_position,
        prompt_tokens=prompt_tokens,
        heads_per_layer=1,
        statistics=_OfFirst(view),
        slots=None if view.slots is None else _First(view.slots, view.heads_per_layer),
    )


def _of_heads(view: KVView, statistic: Statistic) -> Tensor:
    [kept] = apart((statistic,))
    numbers = view.statistic(kept)
    split = _SPLIT.get(type(statistic))
    if split is not None:
        return split(numbers, view.group)
    each = isinstance(statistic, OfWeights)
    return numbers if each else numbers.repeat_interleave(view.group, dim=0)


def _ring_of_heads(record: Tensor, group: int) -> Float[Tensor, "lane query number"]:
    """Split [lane, window, group * head_dim + 1] by query head; each gets the position."""
    lanes, window, _ = record.shape
    queries = record[:, :, :-1].view(lanes, window, group, -1)
    query_positions = record[:, :, None, -1:].expand(-1, -1, group, -1)
    whole: Tensor = queries.new_empty(lanes, group, window, queries.shape[3] + 1)
    whole[..., :-1], whole[..., -1:] = queries.transpose(1, 2), query_positions.transpose(1, 2)
    return whole.flatten(0, 1)


def _moments_of_heads(record: Tensor, group: int) -> Float[Tensor, "lane one number"]:
    """Split [lane, 1, group * numbers] by query head."""
    return record.view(record.shape[0] * group, 1, -1)


_SPLIT: dict[type[Statistic], Callable[[Tensor, int], Tensor]] = {
    QueryRing: _ring_of_heads,
    QueryMoments: _moments_of_heads,
}


@dataclass(frozen=True, slots=True)
class _Repeated:
    """Keys and values of a KV head, repeated for each of its query heads."""

    slots: SlotReader
    group: int

    def keys(self) -> Float[Tensor, "lane slot head_dim"]:
        return self.slots.keys().repeat_interleave(self.group, dim=0)

    def values(self) -> Float[Tensor, "lane slot value_dim"]:
        return self.slots.values().repeat_interleave(self.group, dim=0)


@dataclass(frozen=True, slots=True)
class _OfFirst(Mapping[str, Tensor]):
    """Statistics of the first head of each layer, sliced on access."""

    view: KVView

    def __getitem__(self, name: str) -> Tensor:
        numbers, heads = self.view.statistics[name], self.view.heads_per_layer
        # some statistics have rows per query head: take all rows of the first lane
        rows = len(numbers) * heads // len(self.view.positions)
        of_layer = numbers.reshape(-1, rows, *numbers.shape[1:])
        return of_layer[:, : rows // heads].flatten(0, 1)

    def __iter__(self) -> Iterator[str]:
        return iter(self.view.statistics)

    def __len__(self) -> int:
        return len(self.view.statistics)


@dataclass(frozen=True, slots=True)
class _First:
    """Keys and values of the first head of each layer."""

    slots: SlotReader
    heads: int

    def keys(self) -> Float[Tensor, "lane slot head_dim"]:
        return self.slots.keys()[:: self.heads]

    def values(self) -> Float[Tensor, "lane slot value_dim"]:
        return self.slots.values()[:: self.heads]
