"""POST /v1/embeddings: pooled hidden states of prompts, in OpenAI's format."""

import base64
import time
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from quire.api.llm import embedding_params
from quire.sampling.outputs import RequestOutput
from quire.sampling.pooling import normalized
from quire.serve.endpoints import Endpoints
from quire.serve.errors import FieldError, RequestFailed
from quire.serve.json_route import JsonRoute
from quire.serve.params import naming_fields_of
from quire.serve.protocol import EmbeddingBody, as_prompts
from quire.serve.responses import usage_body
from quire.serve.service import Service
from quire.serve.streaming import collected
from quire.serve.submission import submit
from quire.serve.tenant_keys import tenant_of

PATH = "/v1/embeddings"


class EmbeddingEndpoint:
    """Handler of embeddings. They run in the engine as prompts without output tokens."""

    def __init__(self, service: Service, endpoints: Endpoints) -> None:
        self._service, self._endpoints = service, endpoints

    def router(self) -> APIRouter:
        router = APIRouter(route_class=JsonRoute)
        router.add_api_route(PATH, self.embeddings, methods=["POST"])
        return router

    async def embeddings(self, body: EmbeddingBody, request: Request) -> Response:
        """Compute embeddings of texts or token ids."""
        with naming_fields_of(body):
            return await self._embeddings(body, request)

    async def _embeddings(self, body: EmbeddingBody, request: Request) -> Response:
        service, endpoints = self._service, self._endpoints
        endpoints.check(body, request)
        _check_dimensions(body.dimensions, service.llm.model.spec.hidden_size)
        params = embedding_params(service.llm.model, body.pooling)
        requested = as_prompts(body.input)
        service.check_number(len(requested), params)
        turn = service.turn(tenant_of(request), service.rule_of(body, tenant_of(request)))
        prompts = await endpoints.prompts(body, requested, turn)
        response_id = f"embd-{uuid.uuid4().hex}"
        submission = await submit(service, request, body, prompts, params, response_id)
        try:
            outputs = await collected(submission.outputs, request)
        finally:
            submission.settle(0)
        if any(output.embedding is None for output in outputs):
            raise RequestFailed("the request was cancelled before its embeddings were computed")
        return JSONResponse(_response(response_id, service.model_name, body, outputs))


def _response(
    response_id: str, model: str, body: EmbeddingBody, outputs: Sequence[RequestOutput]
) -> dict[str, Any]:
    usage = usage_body([output.usage for output in outputs])
    del usage["completion_tokens"]
    return {
        "id": response_id,
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": [
            {"object": "embedding", "index": index, "embedding": _embedding(body, output)}
            for index, output in enumerate(outputs)
        ],
        "usage": usage,
    }


def _embedding(body: EmbeddingBody, output: RequestOutput) -> str | list[float]:
    assert output.embedding is not None, "checked before"
    vector = np.asarray(output.embedding, dtype=np.float32)
    if body.normalize is not False:
        vector = normalized(output.embedding)
    if body.encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
    values: list[float] = vector.tolist()
    return values


def _check_dimensions(wanted: int | None, size: int) -> None:
    if wanted not in (None, size):
        raise FieldError(
            "dimensions",
            f"expected `dimensions` of {size}, the size of the model's hidden states, got "
            f"{wanted}: decoders are not trained for shorter embeddings; leave it out",
        )
