"""Embeddings: the hidden states of a prompt, pooled to one vector.

last   the hidden state of the last token, which has attended to the whole prompt
mean   the mean over all tokens of the prompt
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from quire.config.sampling_params import Pooling
from quire.errors import RequestError
from quire.scheduler.request import Request

FILE = Path("1_Pooling") / "config.json"
_MODES: dict[str, Pooling] = {"pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean"}
_PREFIX = "pooling_mode_"


@dataclass(frozen=True, slots=True)
class StepHidden:
    """Hidden states of consecutive prompt tokens of one request in a step."""

    request: Request
    first_position: int
    states: Float[Tensor, "rows hidden"]  # after the last layer and its norm


def pooled_rows(pooling: Pooling, first: int, tokens: int, prompt_tokens: int) -> range:
    """Rows of a chunk, from its start, whose hidden states are pooled."""
    in_prompt = max(0, min(tokens, prompt_tokens - first))
    if pooling == "mean":
        return range(in_prompt)
    is_last = first + in_prompt == prompt_tokens
    return range(in_prompt - 1, in_prompt) if in_prompt and is_last else range(0)


class PooledStates:
    """The pooled hidden states of one request; chunks are added in any number.

    A preempted prompt is computed again from an earlier token: states that were added are skipped.
    """

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._end = self._count = 0

    def add(self, found: StepHidden) -> None:
        new = found.states[max(0, self._end - found.first_position) :]
        if not len(new):
            return
        total = new.to(torch.float64).sum(0)
        self._sum = total if self._sum is None else self._sum + total
        self._end, self._count = found.first_position + len(found.states), self._count + len(new)

    def vector(self) -> tuple[float, ...]:
        """The embedding in float32, not normalized."""
        assert self._sum is not None, "the whole prompt has been computed"
        mean = (self._sum / self._count).to("cpu", torch.float32)
        values: list[float] = mean.tolist()
        return tuple(values)


def normalized(vector: tuple[float, ...]) -> np.ndarray:
    """The vector in float32 with a Euclidean norm of 1; a vector of zeros is unchanged."""
    found = np.asarray(vector, dtype=np.float64)
    norm = float(np.linalg.norm(found))
    return (found / (norm or 1.0)).astype(np.float32)


def model_pooling(folder: Path | None) -> Pooling:
    """The pooling of a model folder; "last" without a config, as for decoders in general."""
    path = None if folder is None else folder / FILE
    if path is None or not path.is_file():
        return "last"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RequestError(
            f"{FILE} of the model cannot be read: {error}", param="pooling"
        ) from None
    named = config if isinstance(config, dict) else {}
    modes = [name for name, value in named.items() if name.startswith(_PREFIX) and value is True]
    if len(modes) != 1 or modes[0] not in _MODES:
        shown = ", ".join(modes) or "none"
        raise RequestError(
            f"{FILE} of the model names the pooling {shown}, expected one of {', '.join(_MODES)}: "
            "set the pooling of the request",
            param="pooling",
        )
    return _MODES[modes[0]]
