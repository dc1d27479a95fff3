"""From a submission to its sequences: one, n draws from one prompt, or the beams of a search."""

from dataclasses import replace

from quire.scheduler.request import Request, RequestGroup


def make_sequences(request: Request) -> list[Request]:
    """The sequences that a request asks for, itself the first or the only one.

    Sequence i draws with the request's seed + i, so the first draws what it would draw alone. Only
    the first has its prompt scored. Of a beam search only the first is a member of its group; the
    others have a place kept.
    """
    params = request.params
    if params.num_sequences == 1 and not params.use_beam_search:
        return [request]
    group = RequestGroup(request.request_id, atomic=params.use_beam_search)
    request.group = group
    sequences = [_sibling(request, index) for index in range(params.num_sequences)]
    last = 1 if group.atomic else len(sequences)
    group.members, group.spare = sequences[:last], sequences[last:]
    return sequences


def _sibling(request: Request, index: int) -> Request:
    params = request.params
    scored = not index or not params.max_tokens  # without tokens to generate it must be asked for
    return replace(
        request,
        request_id=f"{request.request_id}#{index}" if index else request.request_id,
        sampling_seed=request.sampling_seed + index,
        arrival=request.arrival + index,
        params=replace(
            params,
            seed=None,  # which would count before `sampling_seed`
            prompt_logprobs=params.prompt_logprobs if scored else None,
            logprobs=0 if params.ranked and params.logprobs is None else params.logprobs,
        ),
        output_token_ids=[],
        trace=[],
    )
