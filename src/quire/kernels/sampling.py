"""Operations on logits between the model and the sampled token: one function per step.

Every function maps `[rows, vocab]` logits to new ones, processes each row independently, and does
not modify its arguments. A banned token has the logit -inf. The caller selects the steps of a
request and their order.

On a CPU, a function may read its data to choose the least work. On another device the CPU would
wait for that, so the function does the work that suffices for any data. The results are equal.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Logits = Float[Tensor, "rows vocab"]

FIRST_TOP_P_WIDTH = 1024
"""Initial number of candidates of `keep_top_p`: usually enough, and far cheaper than a sort."""

WEIGHT_BITS = 44
"""Token weights are integers; the likeliest token has weight 2 ** 44, so 2 ** 18 fit in int64."""


def keep_only(
    logits: Logits, row_ids: Int[Tensor, " pairs"], token_ids: Int[Tensor, " pairs"]
) -> Logits:
    """Ban every token of a row in `row_ids` that is not paired with that row."""
    limited = torch.zeros(logits.shape[0], 1, dtype=torch.bool, device=logits.device)
    limited[row_ids] = True
    allowed = torch.zeros_like(logits, dtype=torch.bool)
    allowed[row_ids, token_ids] = True
    return logits.masked_fill(limited & ~allowed, -torch.inf)


def ban(logits: Logits, row_ids: Int[Tensor, " pairs"], token_ids: Int[Tensor, " pairs"]) -> Logits:
    """Ban the paired tokens, each in its row."""
    banned = torch.full((), -torch.inf, dtype=logits.dtype, device=logits.device)
    return logits.index_put((row_ids, token_ids), banned)


def add_bias(
    logits: Logits,
    row_ids: Int[Tensor, " pairs"],
    token_ids: Int[Tensor, " pairs"],
    biases: Float[Tensor, " pairs"],
) -> Logits:
    """Add a bias to each paired token; a banned token remains banned."""
    return logits.index_put((row_ids, token_ids), biases.to(logits.dtype), accumulate=True)


def count_tokens(
    row_ids: Int[Tensor, " pairs"], token_ids: Int[Tensor, " pairs"], num_rows: int, vocab_size: int
) -> Int[Tensor, "rows vocab"]:
    """Count how often each token is paired with each row."""
    counts = torch.zeros(num_rows, vocab_size, dtype=torch.int64, device=row_ids.device)
    return counts.index_put_((row_ids, token_ids), torch.ones_like(token_ids), accumulate=True)


def penalize_repetition(
    logits: Logits, seen: Bool[Tensor, "rows vocab"], penalties: Float[Tensor, " rows"]
) -> Logits:
    """Divide the positive logits of tokens that were seen by the penalty, multiply the negative.

    Source: Keskar et al. 2019 (CTRL), section 4.1, with the sign rule of Transformers.
    """
    penalty = penalties[:, None]
    penalized = torch.where(logits < 0, logits * penalty, logits / penalty)
    return torch.where(seen, penalized, logits)


def penalize_output(
    logits: Logits,
    counts: Int[Tensor, "rows vocab"],
    presence: Float[Tensor, " rows"],
    frequency: Float[Tensor, " rows"],
) -> Logits:
    """Subtract `presence` once and `frequency` per occurrence from tokens of the output.

    Source: OpenAI API reference, `presence_penalty` and `frequency_penalty`.
    """
    return logits - presence[:, None] * (counts > 0) - frequency[:, None] * counts


def apply_temperature(logits: Logits, temperatures: Float[Tensor, " rows"]) -> Logits:
    """Divide each row by its temperature (> 0): below 1 sharpens, above 1 flattens."""
    return logits / temperatures[:, None]


def keep_top_k(logits: Logits, counts: Int[Tensor, " rows"], largest: int | None = None) -> Logits:
    """Ban all but each row's k likeliest tokens (k >= 1); ties with the k-th are retained.

    Args:
        logits: [rows, vocab].
        counts: k of each row.
        largest: the largest k, if the caller knows it; None: it is read from `counts`.
    """
    counts = counts.clamp(max=logits.shape[1])
    width = int(counts.max()) if largest is None else min(largest, logits.shape[1])
    ranked = logits.topk(width, dim=-1).values
    smallest = ranked.gather(1, counts[:, None] - 1)
    return logits.masked_fill(logits < smallest, -torch.inf)


def keep_top_p(
    logits: Logits, masses: Float[Tensor, " rows"], *, reads: bool | None = None
) -> Logits:
    """Ban all but the smallest set of likeliest tokens whose probability reaches the mass (> 0).

    A token is retained if the tokens likelier than it sum to less than the mass, so the first token
    is always retained. Ties with the last token are retained too, so that the result does not
    depend on the order of a sort.
    Source: Holtzman et al. 2020, section 3.1 (nucleus sampling).
    Cost: one pass and a partial sort of 1,024 tokens; a wider sort only for flat distributions.
    Without `reads`, one sort of all tokens.

    Args:
        logits: [rows, vocab].
        masses: probability to reach, for each row.
        reads: whether data may be read; default: on a CPU.
    """
    mass = masses.double()[:, None]
    log_total = logits.logsumexp(dim=-1, keepdim=True).double()
    vocab_size = logits.shape[1]
    width = min(FIRST_TOP_P_WIDTH, vocab_size) if _may_read(logits, reads=reads) else vocab_size
    while True:
        ranked = logits.topk(width, dim=-1).values
        probabilities = (ranked.double() - log_total).exp()
        reached = probabilities.cumsum(dim=-1)
        if width == vocab_size or bool((reached[:, -1:] >= mass).all()):
            break
        width = min(width * 8, vocab_size)
    kept = reached - probabilities < mass
    smallest = ranked.masked_fill(~kept, torch.inf).amin(dim=-1, keepdim=True)
    return logits.masked_fill(logits < smallest, -torch.inf)


def keep_min_p(logits: Logits, shares: Float[Tensor, " rows"]) -> Logits:
    """Ban tokens below this fraction of the likeliest token's probability.

    Source: Nguyen et al. 2024 (min-p), compared in logits: p < s * p_max is l < l_max + log(s).
    """
    smallest = logits.amax(dim=-1, keepdim=True) + shares.log()[:, None]
    return logits.masked_fill(logits < smallest, -torch.inf)


def draw(
    logits: Logits, uniforms: Float[Tensor, " rows"], *, reads: bool | None = None
) -> Int[Tensor, " rows"]:
    """Sample one token per row by inverting its cumulative distribution at a number in [0, 1).

    The distribution is ordered by token ids: rounding of logits cannot exchange two tokens, unlike
    in the order of probabilities. Weights are integers, whose sum does not depend on the order. So
    the boundaries do not depend on the device, on other rows or on banned tokens. A row without
    valid tokens (all banned, or NaN) returns an arbitrary token; the caller must check for that.

    Args:
        logits: [rows, vocab].
        uniforms: a number of each row.
        reads: whether data may be read, to skip banned tokens; default: on a CPU.
    """
    candidates = _candidates(logits) if _may_read(logits, reads=reads) else None
    logits = logits if candidates is None else logits.gather(1, candidates)
    relative = (logits - logits.amax(dim=-1, keepdim=True)).double().exp().nan_to_num()
    cumulative = (relative * 2.0**WEIGHT_BITS).round().long().cumsum(dim=-1)
    total = cumulative[:, -1:]
    targets = (uniforms.double()[:, None] * total).long().minimum(total - 1)
    found = torch.searchsorted(cumulative, targets, right=True)
    return (found if candidates is None else candidates.gather(1, found)).squeeze(1)


def _may_read(logits: Logits, *, reads: bool | None) -> bool:
    return logits.device.type == "cpu" if reads is None else reads


def _candidates(logits: Logits) -> Int[Tensor, "rows candidates"]:
    """Return a superset of the tokens that are not banned, in ascending order."""
    num_rows, vocab_size = logits.shape
    width = int((logits > -torch.inf).sum(dim=-1).amax().clamp(min=1))
    if width * 8 > vocab_size:
        return torch.arange(vocab_size, device=logits.device).expand(num_rows, -1)
    return logits.topk(width, dim=-1).indices.sort(dim=-1).values


def score(
    logits: Logits,
    token_ids: Int[Tensor, " rows"],
    num_top: int,
    unlisted: Int[Tensor, " tokens"] | None = None,
) -> tuple[
    Float[Tensor, " rows"],
    Int[Tensor, " rows"],
    Float[Tensor, "rows top"],
    Int[Tensor, "rows top"],
]:
    """Return log-probability and rank of one token per row, and the likeliest tokens.

    Args:
        logits: [rows, vocab].
        token_ids: [rows] the tokens.
        num_top: number of likeliest tokens.
        unlisted: tokens that are part of the distribution, but not of the ranking; None: none.

    Returns:
        logprobs [rows] in float32 (nats); ranks [rows], 1 for the likeliest; the `num_top` largest
        log-probabilities [rows, num_top], descending, and their token ids.
    """
    log_total = logits.float().logsumexp(dim=-1, keepdim=True)
    chosen = logits.gather(1, token_ids[:, None])
    if unlisted is not None:
        logits = logits.index_fill(1, unlisted, -torch.inf)
    ranks = (logits > chosen).sum(dim=-1) + 1
    top = logits.topk(num_top, dim=-1)
    return (chosen - log_total).squeeze(1), ranks, top.values - log_total, top.indices
