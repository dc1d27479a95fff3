"""Embeddings of prompts."""

from dataclasses import dataclass

from quire.config.sampling_params import Pooling, SamplingParams
from quire.models.loader import LoadedModel
from quire.models.pooling import model_pooling
from quire.sampling.outputs import RequestOutput, Usage
from quire.sampling.pooling import normalized


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingOutput:
    """The embedding of a prompt.

    Attributes:
        request_id: id of the request.
        prompt_token_ids: the prompt.
        embedding: float32 values; None after an error.
        error: error message; None if the embedding was computed.
        usage: resources of the request.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    embedding: tuple[float, ...] | None
    error: str | None
    usage: Usage


def embedding_params(model: LoadedModel, pooling: Pooling | None = None) -> SamplingParams:
    """Sampling parameters of a request for an embedding.

    Args:
        model: the model.
        pooling: see `SamplingParams`; None: that of the model, else "last".

    Raises:
        RequestError: the pooling config of the model cannot be used.
    """
    chosen = model_pooling(model.folder) if pooling is None else pooling
    return SamplingParams(max_tokens=0, pooling=chosen)


def embedding_output(output: RequestOutput, *, normalize: bool) -> EmbeddingOutput:
    """The embedding of a complete output, with a Euclidean norm of 1 if `normalize` is set."""
    vector = output.embedding
    if vector is not None and normalize:
        vector = tuple(normalized(vector).tolist())
    return EmbeddingOutput(
        request_id=output.request_id,
        prompt_token_ids=output.prompt_token_ids,
        embedding=vector,
        error=output.error,
        usage=output.usage,
    )
