"""Preparation of a model for embeddings."""

from quire.config.sampling_params import SamplingParams
from quire.errors import RequestError
from quire.models.base import HiddenStates
from quire.models.loader import LoadedModel


def check_pooling(model: LoadedModel, params: SamplingParams) -> None:
    """Prepare the model for embeddings, at the first request with `pooling`.

    Args:
        model: the model.
        params: sampling parameters of a request.

    Raises:
        RequestError: the model has no hidden states.
    """
    if params.pooling is None:
        return
    why_not: str | None = "its decoder returns logits only"
    if isinstance(model.decoder, HiddenStates):
        why_not = model.decoder.prepare_hidden_states()
    if why_not is not None:
        raise RequestError(f"{model.name} has no embeddings: {why_not}", param="pooling")
