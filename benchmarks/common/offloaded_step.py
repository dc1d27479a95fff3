"""Simulate a decode step of an offloaded model: asynchronous copies, products, attention.

Recomputed tokens come first and may end within a row. Tokens with CPU attention come last. If a row
is split between CPU and device attention, the two partial results are merged; whole rows need no
merging. Staging is poisoned if the caller enables it.

The engine runs a step in one way, with the split that its measured rates select. Here every variant
of a schedule runs the same step with the same staging, for any split into recomputed tokens,
transferred tokens and CPU attention. Variants can thus be compared and predicted separately.
"""

import math

import torch
from torch import Tensor

from benchmarks.common.link_codecs import Coder
from benchmarks.common.offloaded_model import (
    CHANGE,
    OffloadedModel,
    PartialAttention,
    attend_part,
    attend_rows,
    normed,
)
from benchmarks.common.target import Target
from quire.errors import ConfigError
from quire.offload.schedule.executor import Work, dispatch
from quire.offload.schedule.work import BatchTokens, Rules
from quire.offload.timeline import Kind, Operation


class Staging:
    """Reusable device buffers shared by all arms; each buffer has the size of its largest use.

    Args:
        target: the device.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._flat: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the named buffer with its old contents.

        Raises:
            ConfigError: the device has too little free memory.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        if name not in self._flat or self._flat[name].numel() < num_bytes:
            self._flat.pop(name, None)
            self._target.require(num_bytes, f"staging for {name}", CHANGE)
            device = self._target.device
            self._flat[name] = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        return self._flat[name][:num_bytes].view(dtype).view(shape)


class OffloadedStep:
    """One decode step of a batch.

    Args:
        model: the model that the step runs.
        staging: staging buffers of its device.
        batch: tokens, equally many of each row; either all or none are on the device.
        rules: rules of the layout.
        poison: fill staging with NaN after use.

    Attributes:
        hidden: hidden states of the rows after the last layer that ran.

    Raises:
        ConfigError: rows of unequal length, or CPU attention on quantized KV.
    """

    def __init__(
        self,
        model: OffloadedModel,
        staging: Staging,
        batch: BatchTokens,
        rules: Rules,
        *,
        poison: bool = False,
    ) -> None:
        self._model, self._batch, self._poison = model, batch, poison
        self._held = batch.x + batch.kv + batch.resident
        self._context, rest = divmod(self._held + batch.host, model.case.rows)
        if rest:
            raise ConfigError(
                f"expected equally many tokens in each of {model.case.rows} rows, got {batch}"
            )
        self._rows, self._partial = divmod(self._held, self._context or 1)
        self._host_rows = model.case.rows - self._rows
        if batch.host and not model.kv_coder.is_plain:
            raise ConfigError(
                f"expected plain KV for CPU attention, got {model.link_codecs.label}; "
                "omit the codec"
            )
        self._ring = bool(rules.x_ring)
        self._stage(staging, rules)
        self.hidden = model.begin
        self._query = self._attended = model.begin
        self._host_query = self._host_out = torch.zeros(0)
        self._host_part: PartialAttention | None = None
        self._compute_queries(0)

    def _stage(self, staging: Staging, rules: Rules) -> None:
        model, batch, slots = self._model, self._batch, rules.slots
        case, dtype = model.case, model.kv_coder.dtype
        self._kv = staging.take("KV", (slots, self._held, case.kv_width), dtype)
        buffers = rules.x_ring or slots
        longest = -(-batch.x // rules.x_chunks) if self._ring else batch.x
        self._x = [_planes(staging, f"X {n}", model.x_coder, longest) for n in range(buffers)]
        coded = 0 if model.kv_coder.is_plain else batch.kv
        self._codes = [_planes(staging, f"codes {n}", model.kv_coder, coded) for n in range(slots)]
        rows = (case.spec.num_layers, case.rows)
        self._new_kv = staging.take("new KV", (*rows, case.kv_width), dtype)
        self._new_x = staging.take("new X", (*rows, case.spec.hidden_size), dtype)
        if batch.resident:
            shape = (model.distinct, self._held, case.kv_width)
            self._resident = staging.take("resident KV", shape, dtype)
            for layer, resident in enumerate(self._resident):
                resident.copy_(model.plain_kv(layer)[: self._held])

    @property
    def work(self) -> Work:
        """Function that executes the step's operations."""
        kinds: dict[str, Work] = {
            Kind.X_IN: self._load_x,
            Kind.KV_IN: self._load_kv,
            Kind.KV_OUT: self._store_kv,
            Kind.HIDDEN_OUT: self._store_x,
            Kind.PROJECT: self._project,
            Kind.ATTEND: self._attend,
            Kind.HOST_ATTEND: self._host_attend,
            Kind.LAYER: self._finish,
        }
        found = dispatch(kinds)

        def do(operation: Operation) -> None:
            with torch.inference_mode():
                found(operation)

        return do

    # ---- copies --------------------------------------------------------------------------------

    def _load_x(self, op: Operation) -> None:
        source = self._model.x(op.layer)
        _copy([plane[op.first : op.first + op.tokens] for plane in source], self._x_buffer(op))

    def _load_kv(self, op: Operation) -> None:
        first, end = op.first, op.first + op.tokens
        source = [p[self._batch.x + first : self._batch.x + end] for p in self._model.kv(op.layer)]
        if self._model.kv_coder.is_plain:
            buffer = self._kv[op.slot, self._batch.x + first : self._batch.x + end]
            _copy(source, [buffer.view(source[0].shape)])
        else:
            _copy(source, [plane[first:end] for plane in self._codes[op.slot]])

    def _store_kv(self, op: Operation) -> None:
        self._model.new_kv[op.layer].copy_(self._new_kv[op.layer], non_blocking=True)

    def _store_x(self, op: Operation) -> None:
        self._model.new_x[op.layer].copy_(self._new_x[op.layer], non_blocking=True)

    def _x_buffer(self, op: Operation) -> list[Tensor]:
        first = 0 if self._ring else op.first
        return [plane[first : first + op.tokens] for plane in self._x[op.x_slot]]

    # ---- computation ---------------------------------------------------------------------------

    def _project(self, op: Operation) -> None:
        model, end = self._model, op.first + op.tokens
        into = self._kv[op.slot, op.first : end]
        embedded = op.layer == 0 and model.embedded is not None
        staged = self._x_buffer(op) if not embedded else []
        if embedded:
            assert model.embedded is not None, "the first layer's activations are on the device"
            x = model.embedded[op.first : end]
        elif model.x_coder.is_plain:
            x = staged[0].view(op.tokens, -1)
        else:
            x = into.new_empty(op.tokens, model.case.spec.hidden_size)
            model.x_coder.decode(staged, x)
        model.layer(op.layer).project(x, into)
        if self._poison and not embedded:
            x.fill_(float("nan"))

    def _host_attend(self, op: Operation) -> None:
        case, query = self._model.case, self._host_query
        kv = self._model.kv(op.layer)[0].view(case.tokens, -1)[-op.tokens :]
        if self._partial:
            first = self._context - self._partial
            self._host_part = attend_part(case, query[:1], kv[:first])
            query, kv = query[1:], kv[first:]
        if len(query):
            self._host_out[-len(query) :].copy_(attend_rows(case, query, kv))

    def _attend(self, op: Operation) -> None:
        model, batch = self._model, self._batch
        kv = self._resident[op.layer % model.distinct] if batch.resident else self._kv[op.slot]
        if not model.kv_coder.is_plain and batch.kv:
            model.kv_coder.decode(self._codes[op.slot], kv[batch.x : batch.x + batch.kv])
        whole, parts = self._rows * self._context, []
        if self._rows:
            parts.append(attend_rows(model.case, self._query[: self._rows], kv[:whole]))
        if self._partial:
            parts.append(self._merged(kv[whole:]))
        if self._host_rows:
            offloaded = self._host_out[bool(self._partial) :]
            parts.append(offloaded.to(self.hidden.device, non_blocking=True))
        self._attended = torch.cat(parts)
        given = normed(self.hidden)
        self._new_x[op.layer].copy_(given)
        torch.mm(given, model.layer(op.layer).kv, out=self._new_kv[op.layer])
        if self._poison and not batch.resident:
            kv.fill_(float("nan"))

    def _merged(self, kv: Tensor) -> Tensor:
        """Merge device and CPU attention of the row that is split between them."""
        assert self._host_part is not None, "CPU attention runs before the merge"
        on_device = attend_part(self._model.case, self._query[self._rows : self._rows + 1], kv)
        found = on_device.merged(self._host_part.to(kv.device))
        self._host_part = None
        return found.to(self._query.dtype)

    def _finish(self, op: Operation) -> None:
        self.hidden = self._model.layer(op.layer).finish(self.hidden, self._attended)
        self._compute_queries(op.layer + 1)

    def _compute_queries(self, number: int) -> None:
        """Compute the queries of a layer, and copy those of CPU attention to the host."""
        with torch.inference_mode():
            self._query = normed(self.hidden) @ self._model.layer(number).query
            if not self._host_rows:
                return
            queries = self._query[self._rows :]
            if not self._host_query.numel():  # before the step, where the host may synchronize
                self._host_query, self._host_out = (self._pinned(queries) for _ in range(2))
                self._host_query.copy_(queries)
            else:
                self._host_query.copy_(queries, non_blocking=True)

    def _pinned(self, like: Tensor) -> Tensor:
        return torch.zeros(like.shape, dtype=like.dtype, pin_memory=like.device.type == "cuda")


def _planes(staging: Staging, name: str, coder: Coder, tokens: int) -> list[Tensor]:
    return [
        staging.take(f"{name}.{n}", shape, dtype)
        for n, (shape, dtype) in enumerate(coder.records(tokens))
    ]


def _copy(source: list[Tensor], into: list[Tensor]) -> None:
    for plane, target in zip(source, into, strict=True):
        target.copy_(plane, non_blocking=True)
