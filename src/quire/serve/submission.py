"""Submits the prompts of an HTTP request to the engine."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fastapi import Request

from quire.config.generation_request import GenerationRequest
from quire.config.sampling_params import SamplingParams
from quire.errors import QuireError
from quire.sampling.output_stream import OutputStream
from quire.serve.params import requested_tokens
from quire.serve.protocol import ChatBody, PromptBody
from quire.serve.rate_limits import Charge
from quire.serve.service import Service
from quire.serve.tenant_keys import tenant_of
from quire.serve.text import Prompt


@dataclass(frozen=True, slots=True)
class Submission:
    """Accepted requests."""

    outputs: OutputStream
    charge: Charge

    def settle(self, num_generated_tokens: int) -> None:
        """Cancel requests that have not ended, and return tokens that were not generated."""
        self.outputs.cancel()
        prompt_tokens = sum(len(request.prompt) for request in self.outputs.requests)
        self.charge.settle(prompt_tokens + num_generated_tokens)


async def submit(
    service: Service,
    request: Request,
    body: PromptBody,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    response_id: str,
) -> Submission:
    """Submit all prompts of an HTTP request; all or none run."""
    request.state.response_id = response_id
    tenant = tenant_of(request)
    options = body.request_options()
    options.setdefault("limit_max_tokens", True)
    generation = [
        replace(
            GenerationRequest(prompt.token_ids, params, **options),
            request_id=f"{response_id}-{number}",
            tenant=tenant,
            evict=service.rule_of(body, tenant),
        )
        for number, prompt in enumerate(prompts)
    ]
    grammar = await service.compile(params, tenant)
    charge = service.charge(
        tenant,
        [prompt.token_ids for prompt in prompts],
        params,
        is_estimate=isinstance(body, ChatBody) and requested_tokens(body) is None,
    )
    request.state.response_headers = charge.headers
    ids = [one.request_id for one in generation if one.request_id is not None]
    if service.traces is not None:
        service.traces.begin(ids, request.headers)
    try:
        outputs = await service.submit(generation)
    except BaseException as error:  # also a client that disconnects
        if isinstance(error, QuireError):
            charge.refund()
        else:
            charge.settle(0)
        if service.traces is not None:
            service.traces.forget(ids)
        raise
    finally:
        del grammar  # until now, so that the engine's thread finds it
    return Submission(outputs, charge)
