"""What is done to logits between the model and the chosen token: one function a step.

Every function maps `[rows, vocab]` logits to new ones, treats each row alone, and leaves its
arguments as they are. A token that may not be chosen has the logit -inf. Which steps a request asks
for, and in what order, is not known here.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Logits = Float[Tensor, "rows vocab"]

FIRST_TOP_P_WIDTH = 1024
"""Candidates ranked first by `keep_top_p`: nearly always enough, and far cheaper than a sort."""

WEIGHT_BITS = 44
"""Draws weigh tokens by integers; the likeliest one's is 2 to this. Sums of 2^18 such fit int64."""


def keep_only(
    logits: Logits, row_ids: Int[Tensor, " pairs"], token_ids: Int[Tensor, " pairs"]
) -> Logits:
    """In each row named by `row_ids`, ban every token that is not paired with it."""
    limited = torch.zeros(logits.shape[0], 1, dtype=torch.bool, device=logits.device)
    limited[row_ids] = True
    allowed = torch.zeros_like(logits, dtype=torch.bool)
    allowed[row_ids, token_ids] = True
    return logits.masked_fill(limited & ~allowed, -torch.inf)


def ban(logits: Logits, row_ids: Int[Tensor, " pairs"], token_ids: Int[Tensor, " pairs"]) -> Logits:
    """Ban the paired tokens, each in its row."""
    return logits.index_put((row_ids, token_ids), logits.new_tensor(-torch.inf))


def add_bias(
    logits: Logits,
    row_ids: Int[Tensor, " pairs"],
    token_ids: Int[Tensor, " pairs"],
    biases: Float[Tensor, " pairs"],
) -> Logits:
    """Add a bias to each paired token; a banned token stays banned."""
    return logits.index_put((row_ids, token_ids), biases.to(logits.dtype), accumulate=True)


def count_tokens(
    row_ids: Int[Tensor, " pairs"], token_ids: Int[Tensor, " pairs"], num_rows: int, vocab_size: int
) -> Int[Tensor, "rows vocab"]:
    """How often each token is paired with each row."""
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


def keep_top_k(logits: Logits, counts: Int[Tensor, " rows"]) -> Logits:
    """Ban all but each row's k likeliest tokens (k >= 1); ties with the k-th stay."""
    counts = counts.clamp(max=logits.shape[1])
    ranked = logits.topk(int(counts.max()), dim=-1).values
    smallest = ranked.gather(1, counts[:, None] - 1)
    return logits.masked_fill(logits < smallest, -torch.inf)


def keep_top_p(logits: Logits, masses: Float[Tensor, " rows"]) -> Logits:
    """Ban all but the smallest set of likeliest tokens whose probability reaches the mass (> 0).

    A token stays when the tokens likelier than it sum to less than the mass, so the first one
    always stays. Tokens tied with the last one stay too: which of them a sort puts first must not
    decide.
    Source: Holtzman et al. 2020, section 3.1 (nucleus sampling).
    Cost: one pass and a partial sort of 1,024 tokens; a wider sort only for flat distributions.
    """
    mass = masses.double()[:, None]
    log_total = logits.logsumexp(dim=-1, keepdim=True).double()
    vocab_size = logits.shape[1]
    width = min(FIRST_TOP_P_WIDTH, vocab_size)
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
    """Ban tokens with less than this share of the likeliest token's probability.

    Source: Nguyen et al. 2024 (min-p), compared in logits: p < s * p_max is l < l_max + log(s).
    """
    smallest = logits.amax(dim=-1, keepdim=True) + shares.log()[:, None]
    return logits.masked_fill(logits < smallest, -torch.inf)


def draw(logits: Logits, uniforms: Float[Tensor, " rows"]) -> Int[Tensor, " rows"]:
    """Draw one token a row by inverting its cumulative distribution at a number in [0, 1).

    The distribution runs in the order of token ids: unlike the order of probabilities no rounding
    of a logit can exchange two tokens. Weights are integers, which sum to the same in any order,
    so neither the device nor the other rows nor the tokens left out move a boundary. A row of
    which no token can be drawn (all banned, or NaN) gives some token: the caller looks for that.
    """
    candidates = _candidates(logits)
    logits = logits.gather(1, candidates)
    relative = (logits - logits.amax(dim=-1, keepdim=True)).double().exp().nan_to_num()
    cumulative = (relative * 2.0**WEIGHT_BITS).round().long().cumsum(dim=-1)
    total = cumulative[:, -1:]
    targets = (uniforms.double()[:, None] * total).long().minimum(total - 1)
    return candidates.gather(1, torch.searchsorted(cumulative, targets, right=True)).squeeze(1)


def _candidates(logits: Logits) -> Int[Tensor, "rows candidates"]:
    """Ids, in rising order, of at least every token that is not banned."""
    num_rows, vocab_size = logits.shape
    width = int((logits > -torch.inf).sum(dim=-1).amax().clamp(min=1))
    if width * 8 > vocab_size:
        return torch.arange(vocab_size, device=logits.device).expand(num_rows, -1)
    return logits.topk(width, dim=-1).indices.sort(dim=-1).values


def score(
    logits: Logits, token_ids: Int[Tensor, " rows"], num_top: int
) -> tuple[
    Float[Tensor, " rows"],
    Int[Tensor, " rows"],
    Float[Tensor, "rows top"],
    Int[Tensor, "rows top"],
]:
    """Log-probability and rank of one token a row, and the likeliest tokens beside it.

    Returns:
        logprobs [rows] in float32 (nats); ranks [rows], 1 for the likeliest; the `num_top` largest
        log-probabilities [rows, num_top], descending, and their token ids.
    """
    log_total = logits.float().logsumexp(dim=-1, keepdim=True)
    chosen = logits.gather(1, token_ids[:, None])
    ranks = (logits > chosen).sum(dim=-1) + 1
    top = logits.topk(num_top, dim=-1)
    return (chosen - log_total).squeeze(1), ranks, top.values - log_total, top.indices
