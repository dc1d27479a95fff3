"""A training step, and the state for an exact continuation."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quire.errors import ConfigError
from training.config import Recipe
from training.data import KINDS, Batch, BatchMaker
from training.model import Decoder, Rope, make_rope
from training.optimizers import make_optimizers, set_learning_rates
from training.schedule import lr_factor, parse_plan, parse_primer

_SMOOTHING = 0.95


class Trainer:
    """Model, optimizers and step number; the step determines batches and learning rates.

    Attributes:
        step: number of updates.
        tokens: number of training tokens.
        accuracy: smoothed fraction of correct tokens by kind of task; in tasks only answers count.
    """

    def __init__(
        self, model: Decoder, maker: BatchMaker, recipe: Recipe, *, compiled: bool = False
    ) -> None:
        self.model = model
        self.maker = maker
        self.recipe = recipe
        self.plan = parse_plan(recipe.plan)
        self.primer = parse_primer(recipe.primer)
        self.optimizers = make_optimizers(model, recipe)
        self.step = 0
        self.tokens = 0
        self.accuracy: dict[str, float] = {}
        self._forward = torch.compile(model, dynamic=False) if compiled else model
        self._ropes: dict[int, Rope] = {}

    @property
    def finished(self) -> bool:
        """Whether the plan is complete."""
        return self.step >= self.plan.steps

    def advance(self) -> float:
        """Run one update; return the mean loss in nats, weighted as in training."""
        stage = self.plan.stage(self.step)
        batch = self.maker.batch(self.step, stage, self.primer.share(self.step))
        loss = self.backward(batch, stage.length)
        factor = lr_factor(
            self.step,
            self.plan.steps,
            warmup_steps=self.recipe.warmup_steps,
            decay=self.recipe.decay,
        )
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        set_learning_rates(self.optimizers, self.recipe, factor)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.tokens += stage.rows * stage.length
        return loss

    def backward(self, batch: Batch, length: int) -> float:
        """Compute gradients of the whole batch, a few rows at a time."""
        device = self.model.norm.device
        rope = self._rope(length)
        total_weight = float(batch.weights[:, 1:].sum())
        rows = max(1, self.recipe.micro_tokens // length)
        loss_sum, correct = 0.0, []
        for ids, weights in zip(
            torch.split(batch.ids, rows), torch.split(batch.weights, rows), strict=True
        ):
            ids = ids.to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=self.recipe.autocast):
                losses, right = self._forward(
                    ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), rope
                )
            loss = (losses * weights[:, 1:].flatten().to(device)).sum() / total_weight
            loss.backward()
            loss_sum += float(loss.detach())
            correct.append(right.cpu())
        self._record(batch, torch.cat(correct))
        return loss_sum

    def _record(self, batch: Batch, right: Tensor) -> None:
        """Update the smoothed accuracy of every kind in the batch."""
        weights, kinds = batch.weights[:, 1:].flatten(), batch.kinds[:, 1:].flatten()
        for index in sorted(set(kinds.tolist())):
            name = KINDS[index]
            counted = (kinds == index) & ((weights > 0) if name == "text" else (weights == 1))
            if counted.any():
                now = float(right[counted].float().mean())
                old = self.accuracy.get(name, now)
                self.accuracy[name] = _SMOOTHING * old + (1 - _SMOOTHING) * now

    def _rope(self, length: int) -> Rope:
        if length not in self._ropes:
            dtype = torch.bfloat16 if self.recipe.autocast else torch.float32
            device = self.model.norm.device
            self._ropes[length] = make_rope(self.model.config, length, dtype=dtype, device=device)
        return self._ropes[length]

    def _identity(self) -> dict[str, Any]:
        """Values that must be equal to continue a state."""
        return {"model": asdict(self.model.config), "recipe": self.recipe.as_dict()}

    def save(self, path: Path) -> None:
        """Write the state. The old state remains if the process is killed."""
        state = {
            "identity": self._identity(),
            "weights": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
            "tokens": self.tokens,
            "accuracy": self.accuracy,
        }
        unfinished = path.with_suffix(".tmp")
        torch.save(state, unfinished)
        unfinished.replace(path)

    def load(self, path: Path) -> None:
        """Continue from a saved state.

        Raises:
            ConfigError: the state belongs to another model or recipe.
        """
        state = torch.load(path, map_location="cpu", weights_only=True)
        if state["identity"] != self._identity():
            raise ConfigError(
                f"expected a state of {self._identity()}, got one of {state['identity']} in "
                f"{path}; use the original options, or another --out"
            )
        self.model.load_state_dict(state["weights"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.tokens = state["step"], state["tokens"]
        self.accuracy = state["accuracy"]
