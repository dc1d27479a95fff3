"""A plain KVCrush: lists, sets and sums, token by token."""

from copy import deepcopy
from functools import cache
from math import floor

import numpy as np
import torch

from quire.policies.lots import lots_of
from quire.policies.signatures import anchors
from quire.policies.signatures.query_heads import by_query_head
from quire.policies.signatures.representatives import BEST, RANDOM
from support.histories import best, make_history


def history_of(tokens=60, group=3, seed=0, layers=(0, 2)):
    return deepcopy(_drawn(tokens, group, seed, layers))


@cache
def _drawn(tokens, group, seed, layers, ragged=False):
    return make_history(tokens=tokens, group=group, seed=seed, layers=layers, ragged=ragged)


def ragged_history(tokens=60, group=3, seed=0, layers=(0, 2)):
    """KV heads that hold different tokens."""
    return deepcopy(_drawn(tokens, group, seed, layers, ragged=True))


def of_layers(history, policy, keep, piece):
    """By layer: positions, scores [head][token], protected tokens, tokens of each head."""
    view = history.view(policy.statistics)
    heads = by_query_head(view, policy.base.statistics)
    scores = policy.base.score(heads)
    protected = policy.protected(view, torch.full((len(view.positions),), keep - 2 * (piece - 1)))
    per_layer = history.heads * view.group
    for number, layer in enumerate(history.layers):
        lane = number * history.heads
        tokens = history.cached[lane]
        heads_of_layer = range(number * per_layer, (number + 1) * per_layer)
        of_head = [dict(zip(tokens, scores[h].tolist(), strict=False)) for h in heads_of_layer]
        held = {t for t, is_one in zip(tokens, protected[lane], strict=False) if is_one}
        yield layer, tokens, of_head, held, [set(best(s, held, keep)) for s in of_head]


def plain_distance(signature, anchor):
    return sum(a != b for a, b in zip(signature, anchor, strict=True))


def majority(signatures, width):
    return [2 * sum(s[i] for s in signatures) > len(signatures) for i in range(width)]


def plain_anchor(policy, signatures, layer):
    """The bits of the anchor of a layer."""
    width = len(signatures[0])
    if policy.anchor == anchors.MEAN:
        return majority(signatures, width)
    if policy.anchor == anchors.RANDOM:
        lots = lots_of(policy.seed, torch.tensor(layer), torch.arange(width))
        return [value % 2 == 1 for value in lots.tolist()]
    return {
        anchors.ALTERNATING: [i % 2 == 1 for i in range(width)],
        anchors.ZEROS: [False] * width,
        anchors.ONES: [True] * width,
    }[policy.anchor]


def plain_slices(ordered, count, policy, number, score):
    """The retained one of each slice."""
    count, total = min(count, len(ordered)), len(ordered)
    cuts = [(i * total // count, (i + 1) * total // count) for i in range(count)]
    chosen = set()
    for first, end in cuts:
        members = ordered[first:end]
        offset = (end - first - 1) // 2
        if policy.pick == RANDOM:
            value = lots_of(policy.seed, torch.tensor(number), torch.tensor(first))
            offset = int(value) % (end - first)
        elif policy.pick == BEST:
            offset = max(range(len(members)), key=lambda i: (score[members[i]], -i))
        chosen.add(members[offset])
    return chosen


def plain_representatives(signature, count, policy, number, score):
    """The retained ones of numbered signatures."""
    anchor = plain_anchor(policy, list(signature.values()), number)
    ordered = sorted(signature, key=lambda n: (plain_distance(signature[n], anchor), n))
    return plain_slices(ordered, count, policy, number, score)


def plain_count(policy, num_units):
    """Number of retained units that are representatives."""
    return floor(num_units * policy.share_of_all + 1e-9)


def pieces_of(tokens, piece):
    return [tokens[i : i + piece] for i in range(0, len(tokens), piece)]


def plain_set(policy, number, tokens, of_head, protected_tokens, signature_of, keep, piece):
    """Select the tokens of one retained set: its number, scores by query head, bits of a token."""
    pieces = pieces_of(tokens, piece)
    protected_pieces = [p for p in pieces if protected_tokens & set(p) or len(p) < piece]
    free = [p for p in pieces if p not in protected_pieces]
    num_units = min((keep - sum(map(len, protected_pieces))) // piece, len(free))
    mean = {t: np.mean([scores[t] for scores in of_head]) for t in tokens}
    score = {number: sum(mean[t] for t in p) for number, p in enumerate(free)}
    count = plain_count(policy, num_units)
    promoted = best(score, [], num_units - count)
    grouped = [n for n in range(len(free)) if n not in promoted]
    signature = {n: [bit for t in free[n] for bit in signature_of(t)] for n in grouped}
    representatives = set()
    if count and grouped:
        representatives = plain_representatives(signature, count, policy, number, score)
    selected = {*promoted, *representatives}
    return sorted(t for p in [*protected_pieces, *(free[n] for n in selected)] for t in p)


def plain_sets(history, policy, keep, piece=1):
    """The retained sets of all layers, or of all KV heads."""
    if policy.sets == "head":
        return _sets_of_heads(history, policy, keep, piece)
    return [
        plain_set(
            *(policy, layer, tokens, of_head, protected),
            lambda t, wanted=wanted: [t in head for head in wanted],
            *(keep, piece),
        )
        for layer, tokens, of_head, protected, wanted in of_layers(history, policy, keep, piece)
    ]


def _sets_of_heads(history, policy, keep, piece):
    view = history.view(policy.statistics)
    keeps = keep if isinstance(keep, list) else [keep] * len(history.cached)
    scores = policy.base.score(by_query_head(view, policy.base.statistics))
    edges = 2 * (piece - 1)
    wanted_keep = torch.tensor(
        [k - edges if k < len(c) else k for k, c in zip(keeps, history.cached, strict=True)]
    )
    is_protected = policy.protected(view, wanted_keep)
    lanes = []
    for lane, tokens in enumerate(history.cached):
        rows = scores[lane * view.group : (lane + 1) * view.group]
        of_head = [dict(zip(tokens, row.tolist(), strict=False)) for row in rows]
        pairs = zip(tokens, is_protected[lane], strict=False)
        protected = {t for t, is_one in pairs if is_one}
        wanted = [set(best(s, protected, keeps[lane])) for s in of_head]
        lanes.append((tokens, of_head, protected, wanted))
    found = []
    for lane, (tokens, of_head, protected, _) in enumerate(lanes):
        layer, head = divmod(lane, history.heads)
        of_layer = lanes[layer * history.heads : (layer + 1) * history.heads]
        bits = [wanted for *_, heads in of_layer for wanted in heads]
        number = history.layers[layer] * history.heads + head
        found.append(
            plain_set(
                *(policy, number, tokens, of_head, protected),
                lambda t, bits=bits: [t in wanted for wanted in bits],
                *(keeps[lane], piece),
            )
        )
    return found


def plain_kvcrush(history, policy, keep, piece=1):
    """Retained tokens by lane."""
    repeats = 1 if policy.sets == "head" else history.heads
    sets = plain_sets(history, policy, keep, piece)
    return [retained for retained in sets for _ in range(repeats)]
