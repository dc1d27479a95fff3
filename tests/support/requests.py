"""Engine requests for tests of the scheduler, without an engine."""

from collections.abc import Sequence
from typing import Any

from quire.config.sampling_params import SamplingParams
from quire.layout.eviction import KEEP_ALL, EvictionSpec
from quire.scheduler.request import Request, RequestEviction, RequestMemory, RequestSpec


def make_request(
    request_id: str = "r",
    prompt_token_ids: Sequence[int] = (1,),
    params: SamplingParams | None = None,
    *,
    eviction: EvictionSpec = KEEP_ALL,
    statistics: frozenset[str] = frozenset(),
    **spec: Any,
) -> Request:
    """A request as the input processor builds it; `spec`: other fields of `RequestSpec`."""
    options = {"params": SamplingParams() if params is None else params, **spec}
    own = RequestSpec(request_id=request_id, prompt_token_ids=list(prompt_token_ids), **options)
    memory = RequestMemory(statistics=statistics)
    return Request(own, memory=memory, eviction=RequestEviction(spec=eviction))
