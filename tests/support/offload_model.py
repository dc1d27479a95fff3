"""A small attention layer with offloaded KV: the reference result for tests of executors.

Staging slots are filled with NaN after their use, so a read before the write is detected.
"""

import torch

from quire.offload.profiler import Sizes, Speeds
from quire.offload.schedule.executor import Work, dispatch
from quire.offload.schedule.work import BatchTokens, StepWork, even_layers
from quire.offload.timeline import Operation, TaskKind
from quire.plan.rates import CopyRate


class HostedModel:
    """Layers of one head: keys and values are products of X; hidden states go through attention.

    Args:
        tokens: of each batch, by where they are.
        num_layers: of the model.
        slots: of staging.
        device: that computes.
        width: hidden size, and that of the head.
    """

    def __init__(self, tokens, num_layers, slots=2, device="cpu", width=16, seed=0, ring=0):
        draw = torch.Generator().manual_seed(seed)

        def random(*shape):
            return torch.randn(*shape, generator=draw) / width**0.5

        self.device, self.width, self.tokens = torch.device(device), width, tokens
        pin = self.device.type == "cuda"
        host = (lambda t: t.pin_memory()) if pin else (lambda t: t)
        total = tokens.x + tokens.kv + tokens.resident + tokens.host
        self.weights = [random(width, 2 * width).to(self.device) for _ in range(num_layers)]
        self.mixes = [random(width, width).to(self.device) for _ in range(num_layers)]
        self.x = [host(random(total, width)) for _ in range(num_layers)]
        self.kv = [host(x @ w.cpu()) for x, w in zip(self.x, self.weights, strict=True)]
        self.hidden = random(tokens.rows, width).to(self.device)
        self.begin = self.hidden.clone()
        nan = float("nan")
        self.ring = ring
        self.x_slots = torch.full((ring or slots, tokens.x, width), nan, device=self.device)
        self.kv_slots = torch.full((slots, total, 2 * width), nan, device=self.device)
        self.parts = {}

    def work(self) -> Work:
        return dispatch(
            {
                TaskKind.X_IN: self._x_in,
                TaskKind.KV_IN: self._kv_in,
                TaskKind.PROJECT: self._project,
                TaskKind.ATTEND: self._attend,
                TaskKind.HOST_ATTEND: self._host_attend,
                TaskKind.LAYER: self._layer,
            }
        )

    def expected(self) -> torch.Tensor:
        hidden = self.begin.cpu()
        for kv, mix in zip(self.kv, self.mixes, strict=True):
            hidden = torch.tanh(hidden + attend(hidden, kv)[0] @ mix.cpu())
        return hidden

    def _x_in(self, op: Operation) -> None:
        end = op.first + op.tokens
        source = self.x[op.layer][op.first : end]
        self.x_slots[op.x_slot, op.first : end].copy_(source, non_blocking=True)

    def _kv_in(self, op: Operation) -> None:
        first = self.tokens.x + op.first
        end = first + op.tokens
        self.kv_slots[op.slot, first:end].copy_(self.kv[op.layer][first:end], non_blocking=True)

    def _project(self, op: Operation) -> None:
        end = op.first + op.tokens
        x = self.x_slots[op.x_slot, op.first : end]
        if end <= self.tokens.x_on_device or (op.layer == 0 and not op.needs):
            x = self.x[op.layer][op.first : end].to(self.device)
        self.kv_slots[op.slot, op.first : end] = x @ self.weights[op.layer]
        self.x_slots[op.x_slot] = float("nan") if self.ring else self.x_slots[op.x_slot]
        self.x_slots[op.x_slot, op.first : end] = float("nan")

    def _host_attend(self, op: Operation) -> None:
        first = len(self.kv[op.layer]) - op.tokens
        self.parts[op.layer] = attend(self.hidden.cpu(), self.kv[op.layer][first:])

    def _attend(self, op: Operation) -> None:
        transferred = self.tokens.x + self.tokens.kv
        first = transferred + self.tokens.resident
        kv = self.kv_slots[op.slot, :transferred]
        resident = self.kv[op.layer][transferred:first].to(self.device)
        out, lse = attend(self.hidden, torch.cat([kv, resident]))
        if op.layer in self.parts:
            out = merge((out, lse), [part.to(self.device) for part in self.parts.pop(op.layer)])
        self.attended = out
        self.kv_slots[op.slot] = float("nan")

    def _layer(self, op: Operation) -> None:
        self.hidden = torch.tanh(self.hidden + self.attended @ self.mixes[op.layer])


def attend(query, kv):
    """[rows, width] over [tokens, 2 * width]; the output and the log of the sum of exponents."""
    key, value = kv.chunk(2, dim=1)
    scores = query @ key.T
    return torch.softmax(scores, dim=1) @ value, torch.logsumexp(scores, dim=1)


def merge(one, other):
    lse = torch.logaddexp(one[1], other[1])
    return sum(out * torch.exp(part - lse)[:, None] for out, part in (one, other))


def step_of(tokens: BatchTokens, num_layers: int, *, embedded=False, **speeds) -> StepWork:
    rate = CopyRate(bytes_per_s=1e9)
    return StepWork(
        layers=even_layers((tokens,), num_layers, embedded=embedded),
        sizes=Sizes(kv_bytes=128, x_bytes=64),
        speeds=Speeds(inward=rate, outward=rate, project_token_s=1e-7, **speeds),
    )
