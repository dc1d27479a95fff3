"""Hidden states after the last layer and its norm, for embeddings.

In Transformers they are the output of the base model, which the output head receives.
"""

import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from quire.models.base import OwnValue
from quire.models.rope import PROBED_POSITIONS, Probe

Rows = Callable[[Tensor], Tensor]


def note_hidden_states(attention: Any, states_of: Rows) -> None:
    """Pass hidden states to an attention that has `hidden_rows`."""
    rows = getattr(attention, "hidden_rows", None)
    if rows is not None:
        attention.note_hidden_states(states_of(rows))


class LastStates:
    """Holds the output of a base model until its forward has ended; each thread has its own."""

    def __init__(self, base: nn.Module) -> None:
        self._thread = threading.local()
        self._handle = base.register_forward_hook(self._note)

    @classmethod
    def of(cls, model: PreTrainedModel, probe: Probe) -> "tuple[LastStates | None, str | None]":
        """Watch the base model of a causal language model.

        It is the outermost model without an output head that a forward runs: OPT runs the decoder
        of its base model.
        """
        name = type(model).__name__
        for base in model.modules():  # outer modules first
            if base is model or not isinstance(base, PreTrainedModel):
                continue
            found = cls(base)
            probe(PROBED_POSITIONS, OwnValue())
            states = found._states()
            if isinstance(states, Tensor) and states.shape[:-1] == (1, len(PROBED_POSITIONS)):
                return found, None
            found._handle.remove()
        return None, f"{name} has no base model that returns hidden states"

    def take(self) -> Rows:
        """Return a function of rows for the hidden states of this thread's last forward."""
        states = self._states()
        self._thread.output = None
        assert isinstance(states, Tensor), "checked by `of`"
        return lambda rows: states[0][rows]

    def _note(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        self._thread.output = output

    def _states(self) -> object:
        output = getattr(self._thread, "output", None)
        return None if output is None else output[0]
