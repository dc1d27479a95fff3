"""What observes the requests and steps of an engine, in its thread."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from quire.config.generation_request import GenerationRequest
from quire.sampling.outputs import OutputDelta


@runtime_checkable
class StepObserver(Protocol):
    """Called by `AsyncLLM`, in the engine's thread. Steps wait for it."""

    def submitted(self, request_id: str, request: GenerationRequest) -> None:
        """Observe a request that the engine has accepted."""

    def published(self, deltas: Sequence[OutputDelta]) -> None:
        """Observe the outputs of a step."""
