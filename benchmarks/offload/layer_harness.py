"""A small decoder layer whose KV is on the host, on threads: real copies, products and attention.

Gains depend on ratios alone, so the link is throttled until they are those of a large machine:

    xi = hidden / kv_width         rho = seconds of recomputing / seconds of carrying

Staging is poisoned where that is asked for, and what a step computes is compared with attending to
all KV at once.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from benchmarks.offload_schedule.executor import Work, dispatch
from benchmarks.offload_schedule.work import BatchTokens, Rules
from quire.offload.profiler import Sizes
from quire.offload.timeline import Kind, Operation
from quire.profile.timing import seconds

_DISTINCT_LAYERS = 4
_CODE = 2**15 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """What a step computes.

    Attributes:
        hidden: width of activations.
        x_ratio: xi; keys and values of a token are hidden / xi numbers.
        tokens: of all rows, in each layer.
        rows: that decode.
        num_layers: of the model.
    """

    hidden: int = 256
    x_ratio: float = 0.5
    tokens: int = 2048
    rows: int = 4
    num_layers: int = 24

    @property
    def kv_width(self) -> int:
        """Numbers of a token's keys and values."""
        return round(self.hidden / self.x_ratio)

    def sizes(self, *, coded: bool = False) -> Sizes:
        """Bytes on the link; codes take half, and 4 B a token."""
        value, more = (2, 4) if coded else (4, 0)
        kv_bytes, x_bytes = self.kv_width * value + more, self.hidden * value + more
        return Sizes(kv_bytes=kv_bytes, x_bytes=x_bytes, new_kv_bytes=self.kv_width * 4)


@dataclass(frozen=True, slots=True)
class _Plane:
    """Numbers, or codes of them with a scale for each token."""

    values: Tensor
    scales: Tensor | None

    def rows(self, first: int, end: int) -> "_Plane":
        scales = None if self.scales is None else self.scales[first:end]
        return _Plane(self.values[first:end], scales)

    def copy(self, source: "_Plane") -> None:
        self.values.copy_(source.values)
        if self.scales is not None and source.scales is not None:
            self.scales.copy_(source.scales)

    def numbers(self) -> Float[Tensor, "tokens width"]:
        return self.values if self.scales is None else torch.mul(self.values, self.scales)


class LayerHarness:
    """Host and device of one shape.

    Args:
        shape: what is computed.
        poison: fill staging with NaN when it has been used.
    """

    def __init__(self, shape: LayerShape, *, poison: bool = False) -> None:
        self.shape, self._poison = shape, poison
        draw = torch.Generator().manual_seed(0)
        hidden, width = shape.hidden, shape.kv_width

        def random(inner: int, outer: int) -> Tensor:
            return torch.randn(inner, outer, generator=draw).div(inner**0.5)

        count = min(shape.num_layers, _DISTINCT_LAYERS)
        self._recompute = [random(hidden, width) for _ in range(count)]
        self._query = random(hidden, width // 2)
        self._mix = random(width // 2, hidden)
        self._up, self._down = random(hidden, 4 * hidden), random(4 * hidden, hidden)
        self._x = [torch.randn(shape.tokens, hidden, generator=draw) for _ in range(count)]
        self._kv = [x @ w for x, w in zip(self._x, self._recompute, strict=True)]
        self._begin = torch.randn(shape.rows, hidden, generator=draw)
        self._coded = [(_coded(x), _coded(kv)) for x, kv in zip(self._x, self._kv, strict=True)]
        self.hidden = self._begin

    def product_seconds(self) -> float:
        """Seconds of recomputing all tokens of a layer, now."""
        out = torch.empty(self.shape.tokens, self.shape.kv_width)
        return seconds(lambda: torch.mm(self._x[0], self._recompute[0], out=out))

    def expected(self) -> Float[Tensor, "rows hidden"]:
        """What every step ends with, computed at once."""
        hidden = self._begin
        for layer in range(self.shape.num_layers):
            out, _ = _attend(hidden @ self._query, self._kv[layer % len(self._kv)])
            hidden = self._finished(hidden, out)
        return hidden

    def error(self) -> float:
        """Largest difference of what the last step ended with."""
        return float((self.hidden - self.expected()).abs().max())

    def work(self, batch: BatchTokens, rules: Rules, *, coded: bool = False) -> Work:
        """Do a step's operations with fresh staging.

        Args:
            batch: its tokens.
            rules: of its layout.
            coded: KV and X are carried in codes.
        """
        step = _Step(self, batch, rules, coded=coded, poison=self._poison)
        self.hidden = self._begin
        return dispatch(
            {
                Kind.X_IN: step.bring_x,
                Kind.KV_IN: step.bring_kv,
                Kind.KV_OUT: step.store,
                Kind.PROJECT: step.project,
                Kind.ATTEND: step.attend,
                Kind.HOST_ATTEND: step.host_attend,
                Kind.LAYER: step.finish,
            }
        )

    def source(self, layer: int, *, coded: bool) -> tuple[_Plane, _Plane]:
        """X and KV of a layer on the host."""
        place = layer % len(self._x)
        if coded:
            return self._coded[place]
        return _Plane(self._x[place], None), _Plane(self._kv[place], None)

    def weights(self, layer: int) -> Float[Tensor, "hidden width"]:
        """That make KV from X."""
        return self._recompute[layer % len(self._recompute)]

    def queries(self) -> Float[Tensor, "rows head"]:
        """Of the hidden states as they are."""
        return self.hidden @ self._query

    def finish(self, attended: Float[Tensor, "rows head"]) -> None:
        """The rest of a layer."""
        self.hidden = self._finished(self.hidden, attended)

    def _finished(self, hidden: Tensor, attended: Tensor) -> Tensor:
        hidden = hidden + attended @ self._mix
        grown = torch.relu(hidden @ self._up) @ self._down
        return torch.nn.functional.layer_norm(hidden + grown, (self.shape.hidden,))


class _Step:
    """Staging of one step."""

    def __init__(
        self, harness: LayerHarness, batch: BatchTokens, rules: Rules, *, coded: bool, poison: bool
    ) -> None:
        self._harness, self._batch, self._coded, self._poison = harness, batch, coded, poison
        shape, slots = harness.shape, rules.slots
        pieces = rules.x_ring or slots
        longest = -(-batch.x // rules.x_chunks) if rules.x_ring else batch.x
        self._ring = bool(rules.x_ring)
        self._x = [_staging(longest, shape.hidden, coded=coded) for _ in range(pieces)]
        self._codes = [_staging(batch.kv, shape.kv_width, coded=True) for _ in range(slots * coded)]
        held = batch.x + batch.kv
        self._kv = [torch.zeros(held, shape.kv_width) for _ in range(slots)]
        self._stored = torch.zeros(shape.rows, shape.kv_width)
        self._offloaded: tuple[Tensor, Tensor] | None = None
        self._attended = torch.zeros(0)

    def bring_x(self, op: Operation) -> None:
        x, _ = self._harness.source(op.layer, coded=self._coded)
        self._x_place(op).copy(x.rows(op.first, op.first + op.tokens))

    def bring_kv(self, op: Operation) -> None:
        _, kv = self._harness.source(op.layer, coded=self._coded)
        first = self._batch.x + op.first
        source = kv.rows(first, first + op.tokens)
        if self._coded:
            self._codes[op.slot].rows(op.first, op.first + op.tokens).copy(source)
        else:
            self._kv[op.slot][first : first + op.tokens].copy_(source.values)

    def store(self, op: Operation) -> None:
        self._stored.fill_(op.layer)

    def project(self, op: Operation) -> None:
        here = op.layer == 0  # of the first layer X is made from the token ids
        x, _ = self._harness.source(op.layer, coded=False)
        staged = x.rows(op.first, op.first + op.tokens) if here else self._x_place(op)
        target = self._kv[op.slot][op.first : op.first + op.tokens]
        torch.mm(staged.numbers(), self._harness.weights(op.layer), out=target)
        if self._poison and not here and staged.scales is None:
            staged.values.fill_(float("nan"))

    def host_attend(self, op: Operation) -> None:
        _, kv = self._harness.source(op.layer, coded=False)
        first = self._harness.shape.tokens - op.tokens
        self._offloaded = _attend(self._harness.queries(), kv.values[first:])

    def attend(self, op: Operation) -> None:
        kv = self._kv[op.slot]
        if self._coded:
            kv[self._batch.x :] = self._codes[op.slot].numbers()
        self._attended = _merged(_attend(self._harness.queries(), kv), self._offloaded)
        self._offloaded = None
        if self._poison:
            kv.fill_(float("nan"))

    def finish(self, _op: Operation) -> None:
        self._harness.finish(self._attended)

    def _x_place(self, op: Operation) -> _Plane:
        first = 0 if self._ring else op.first
        return self._x[op.x_slot].rows(first, first + op.tokens)


def _staging(tokens: int, width: int, *, coded: bool) -> _Plane:
    if coded:
        return _Plane(torch.zeros(tokens, width, dtype=torch.int16), torch.zeros(tokens, 1))
    return _Plane(torch.zeros(tokens, width), None)


def _coded(numbers: Tensor) -> _Plane:
    scales = numbers.abs().amax(dim=1, keepdim=True) / _CODE
    return _Plane((numbers / scales).round().to(torch.int16), scales)


def _attend(query: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, head] over [tokens, 2 * head]: what comes out, and the log of the sum of weights."""
    key, value = kv.chunk(2, dim=1)
    scores = query @ key.T / key.shape[1] ** 0.5
    return torch.softmax(scores, dim=1) @ value, torch.logsumexp(scores, dim=1)


def _merged(device: tuple[Tensor, Tensor], host: tuple[Tensor, Tensor] | None) -> Tensor:
    """Two parts of one attention by their sums; a part without tokens weighs nothing."""
    if host is None:
        return device[0]
    total = torch.logaddexp(device[1], host[1])
    parts = [out.nan_to_num() * torch.exp(lse - total)[:, None] for out, lse in (device, host)]
    return parts[0] + parts[1]
