"""Latent attention (MLA): which rows of a step attend to latents, and which to expanded heads.

Rows with few new tokens fold the projection of the keys into their queries, attend to the latents
as one KV head, and project the output: no key or value of a head is computed. A chunk of a prompt
expands the latents of its row to keys and values of all heads if that takes fewer multiplications:
a latent is wider than the heads' keys and values.

Keys that are their values times a weight (Gemma 4's `attention_k_eq_v`) are stored in the same way:
the value is the latent of one KV head, beside the elements of the key that RoPE rotates.
Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.2.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.backend import (
    AttentionBackend,
    AttentionMath,
    LaneSlots,
    LatentProjections,
    LayerPages,
    StepShape,
    token_rows,
)
from quire.kernels.device_copies import to_device
from quire.kernels.index import indexed_layer
from quire.kernels.native.backend import NativeAttention
from quire.kernels.reference_backend import ReferenceAttention
from quire.kernels.sparse import attend_planned

EXPANSION_COST = 1.25
"""Time of a multiplication that expands latents, in multiplications of attention.

Measured on a CPU: 1.0 to 1.1 for latents of 512 and 16 heads of 192, 1.4 for latents of 256 and 12
heads of 96; see docs/log.md.
"""
EXPANDED_BYTES = 1 << 30
"""Maximum bytes of the expanded keys and values of a row; longer rows attend to latents."""

Expand = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class LatentHeads:
    """The latent projections of one layer; see `LatentProjections`.

    Args:
        weight: returns the weight that projects latents to the keys and values of each head,
            [heads * (key_dim + value_dim), rank]. It is called each time: the weight can move.
        num_heads: number of heads.
        key_dim: elements of a head's key that are projected (qk_nope_head_dim).
        expand: returns keys and values [batch, head, slot, elements] of latents and rotated parts,
            [batch, 1, slot, elements] each.
    """

    def __init__(
        self, weight: Callable[[], Tensor], num_heads: int, key_dim: int, expand: Expand
    ) -> None:
        self._weight, self._num_heads, self._key_dim = weight, num_heads, key_dim
        self._expand = expand

    @property
    def _by_head(self) -> Tensor:
        weight = self._weight().detach()
        return weight.view(self._num_heads, -1, weight.shape[1])

    @property
    def _keys(self) -> Tensor:
        return self._by_head[:, : self._key_dim]

    @property
    def _values(self) -> Tensor:
        return self._by_head[:, self._key_dim :]

    @property
    def value_dim(self) -> int:
        return self._values.shape[1]

    def stored(self, key: Tensor) -> Tensor:
        return key

    def fold(
        self, query: Float[Tensor, "token num_heads head_dim"]
    ) -> Float[Tensor, "token num_heads joined_dim"]:
        num_heads, key_dim, rank = self._keys.shape
        rotated_dim = query.shape[2] - key_dim
        folded = query.new_empty(len(query), num_heads, rank + rotated_dim)
        projected, rotated = query[..., :key_dim].to(self._keys.dtype), query[..., key_dim:]
        folded[..., :rank] = torch.bmm(projected.transpose(0, 1), self._keys).transpose(0, 1)
        folded[..., rank:] = rotated
        return folded

    def unfold(
        self, out: Float[Tensor, "token num_heads latent_dim"]
    ) -> Float[Tensor, "token num_heads value_dim"]:
        wide = out.transpose(0, 1).to(self._values.dtype)
        return torch.bmm(wide, self._values.transpose(1, 2)).transpose(0, 1).to(out.dtype)

    def expand(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if key.dim() == 3:
            keys, values = self.expand(key[None], value[None])
            return keys[0], values[0]
        weights = self._keys.dtype
        keys, values = self._expand(value.to(weights), key.to(weights))
        return keys.to(key.dtype), values.to(value.dtype)

    def prefers_expanding(self, tokens: int, slots: int) -> bool:
        num_heads, key_dim, rank = self._keys.shape
        projected, pairs = key_dim + self.value_dim, tokens * (slots - (tokens - 1) / 2)
        if slots * num_heads * projected * self._keys.element_size() > EXPANDED_BYTES:
            return False
        # the rotated part is multiplied in both forms
        expansion = EXPANSION_COST * (slots - tokens) * rank * projected
        return expansion < pairs * (2 * rank - projected)


class TiedHeads:
    """Heads whose keys are their values times a weight, apart from the elements that RoPE rotates.

    The rotated elements of a key are stored beside its value. See `LatentProjections`.

    Args:
        weight: returns the weight [head_dim] of the norm of keys.
        rotated: elements of a key that RoPE rotates.
    """

    def __init__(self, weight: Callable[[], Tensor], rotated: Int[Tensor, " element"]) -> None:
        self._weight, self.rotated = weight, rotated

    @property
    def value_dim(self) -> int:
        return len(self._weight())

    def stored(self, key: Tensor) -> Tensor:
        return key[..., self.rotated]

    def fold(
        self, query: Float[Tensor, "token num_heads head_dim"]
    ) -> Float[Tensor, "token num_heads joined_dim"]:
        weight = self._weight().detach().float().clone()
        weight[self.rotated] = 0
        scaled = (query.float() * weight).to(query.dtype)
        return torch.cat([scaled, self.stored(query)], dim=2)

    def unfold(self, out: Tensor) -> Tensor:
        return out

    def expand(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        keys = (value.float() * self._weight().detach().float()).to(key.dtype)
        keys[..., self.rotated] = key
        return keys, value

    def prefers_expanding(self, tokens: int, slots: int) -> bool:
        return False  # joined keys are a quarter wider, and need no copy


@dataclass(frozen=True, slots=True)
class LatentPart:
    """Rows of a step that attend in the same form.

    Attributes:
        joined: whether they attend to latents.
        selects: whether an index selects the slots to which they attend.
        gathers: whether only the selected slots are read.
        plan: of the backend, for these rows; None if it does not compute them.
        step: their new tokens.
        rows, tokens: their indices in the step.
    """

    joined: bool
    selects: bool
    gathers: bool
    plan: object
    step: StepShape
    rows: NDArray[np.int64]
    tokens: NDArray[np.int64]

    def indices(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return rows and tokens on a device."""
        return to_device(self.rows, device), to_device(self.tokens, device)

    def pages(self, pages: LayerPages) -> LayerPages:
        """Return the pages of these rows."""
        (rows, tokens), full = self.indices(pages.rows.device), pages.full_precision
        if full is not None:
            full = full.of_rows(self.rows, self.step.starts, tokens)
        return replace(pages, rows=pages.rows[rows], full_precision=full)


@dataclass(frozen=True, slots=True)
class LatentPlan:
    """A step's rows in one lane group of latents, divided when its first layer attends.

    Attributes:
        backend, step, lanes, page_tokens, slot_bytes: as of a plan of the backend.
        token_row: row of each token, which is a row of its own in `step` and `lanes` because the
            backend computes each token separately; None: it does not.
        parts: see `divided`.
    """

    backend: AttentionBackend
    step: StepShape
    lanes: LaneSlots
    page_tokens: int
    slot_bytes: int
    token_row: NDArray[np.int64] | None = None
    parts: dict[tuple[object, ...], list[LatentPart]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        backend: AttentionBackend,
        step: StepShape,
        lanes: LaneSlots,
        page_tokens: int,
        slot_bytes: int,
    ) -> "LatentPlan":
        token_row = None
        if isinstance(backend, NativeAttention) and backend.fixed_rows is not None:
            step, lanes, token_row = token_rows(step, lanes)
        return cls(backend, step, lanes, page_tokens, slot_bytes, token_row)

    def divided(
        self, latent: LatentProjections, selecting: NDArray[np.int64] | None, *, exact: bool
    ) -> list[LatentPart]:
        """Return the parts; the layers of a group have projections of the same shape.

        Args:
            latent: projections of the layer.
            selecting: rows for which an index selects slots; None: none.
            exact: whether some slots are read in full precision: all of a row are then gathered.
        """
        key = None if selecting is None else selecting.tobytes(), exact
        if key not in self.parts:
            tokens, slots = self.step.tokens, self.lanes.slots[:, 0]
            # the reference always expands, as the model does
            always = isinstance(self.backend, ReferenceAttention)
            expands = np.array(
                [
                    always or (new > 1 and latent.prefers_expanding(new, held))
                    for new, held in zip(tokens.tolist(), slots.tolist(), strict=True)
                ]
            )
            selects = np.isin(np.arange(len(tokens)), [] if selecting is None else selecting)
            gathers = selects & (tokens == 1) & (not exact and not always)
            forms = np.stack([~expands, selects, gathers], axis=1)
            self.parts[key] = [
                self._part(np.flatnonzero((forms == form).all(axis=1)), form.tolist())
                for form in np.unique(forms, axis=0)[::-1]
            ]
        return self.parts[key]

    def _part(self, rows: NDArray[np.int64], form: list[bool]) -> LatentPart:
        joined, selects, gathers = form
        step = StepShape.of(self.step.tokens[rows])
        lanes = replace(self.lanes, slots=np.ascontiguousarray(self.lanes.slots[rows]))
        arguments = step, lanes, self.page_tokens, self.slot_bytes
        starts = np.repeat(self.step.starts[rows] - step.starts, step.tokens)
        return LatentPart(
            joined=joined,
            selects=selects,
            gathers=gathers,
            plan=None if gathers else self.backend.plan(*arguments),
            step=step,
            rows=rows,
            tokens=starts + np.arange(len(starts)),
        )


def attend_pages(
    backend: AttentionBackend,
    plan: object,
    pages: LayerPages,
    math: AttentionMath,
    query: Float[Tensor, "num_tokens num_heads head_dim"],
    fresh: tuple[Tensor, Tensor],
    *,
    column_sums: Tensor | None = None,
) -> Float[Tensor, "num_tokens num_heads value_dim"]:
    """Compute attention over pages of any kind; see `AttentionBackend.attend`.

    Args:
        backend: of the step.
        plan: of the backend; a `LatentPlan` if pages hold latents; or a `SparsePlan`.
        pages: keys and values; or rotated parts of keys, and latents as values.
        math: with `latent` if pages hold latents.
        query: the model's own queries.
        fresh: what was written to the pages.
        column_sums: see `AttentionBackend.attend`.
    """
    latent = math.latent
    if latent is None:
        return attend_planned(backend, plan, pages, math, query, fresh, column_sums=column_sums)
    assert isinstance(plan, LatentPlan), "pages of latents have such plans"
    alone = plan.token_row is not None
    if alone and not math.joined:
        return _attend_token_by_token(backend, plan, pages, math, query, fresh)
    layer = indexed_layer(math, plan.step, plan.lanes.slots, pages, alone=alone)
    selecting = None if layer is None else layer.select()
    parts = plan.divided(latent, selecting, exact=pages.full_precision is not None)
    if len(parts) == 1 and not parts[0].selects:
        attend = partial(backend.attend, parts[0].plan, pages)
        return _in_form(
            parts[0], math, query, partial(attend, fresh=fresh, column_sums=column_sums)
        )
    out = query.new_empty(*query.shape[:2], math.output_dim(pages))
    for part in parts:
        rows, tokens = part.indices(query.device)
        sums, own_math = None if column_sums is None else column_sums[rows], math
        if layer is not None and part.gathers:
            attend = partial(layer.attend_decode, backend, rows=part.rows, column_sums=sums)
        else:
            selected = layer.seen(part.rows) if layer is not None and part.selects else None
            own_math = replace(math, selected=selected)
            own = (fresh[0][tokens], fresh[1][tokens])
            attend = partial(backend.attend, part.plan, part.pages(pages))
            attend = partial(attend, fresh=own, column_sums=sums)
        out[tokens] = _in_form(part, own_math, query[tokens], attend)
        if column_sums is not None and sums is not None:
            column_sums[rows] = sums
    return out


def _attend_token_by_token(
    backend: AttentionBackend,
    plan: LatentPlan,
    pages: LayerPages,
    math: AttentionMath,
    query: Tensor,
    fresh: tuple[Tensor, Tensor],
) -> Tensor:
    """Attend to latents in every row, and project all tokens in products of one shape."""
    assert isinstance(backend, NativeAttention), "others compute rows together"
    assert backend.fixed_rows is not None, "others compute rows together"
    assert plan.token_row is not None, "see `attend_pages`"
    assert math.latent is not None, "see `attend_pages`"
    count, fixed_rows = len(query), backend.fixed_rows

    def projected(project: Callable[[Tensor], Tensor], vectors: Tensor) -> Tensor:
        whole = vectors.new_zeros(fixed_rows, *vectors.shape[1:])
        whole[:count] = vectors
        return project(whole)[:count].contiguous()

    by_token = replace(pages, rows=pages.rows[to_device(plan.token_row, query.device)])
    folded_query = projected(math.latent.fold, query)
    joined = replace(math, joined=True)
    out = attend_pages(backend, plan, by_token, joined, folded_query, fresh)
    return projected(math.latent.unfold, out)


def _in_form(
    part: LatentPart,
    math: AttentionMath,
    query: Tensor,
    attend: Callable[[AttentionMath, Tensor], Tensor],
) -> Tensor:
    if not part.joined or math.latent is None or math.joined:
        return attend(math, query)
    return math.latent.unfold(attend(*folded(math, query)))


def folded(math: AttentionMath, query: Tensor) -> tuple[AttentionMath, Tensor]:
    """Return operations and queries that are compared with joined keys; see `AttentionMath`."""
    if math.latent is None or math.joined:
        return math, query
    return replace(math, joined=True), math.latent.fold(query)
