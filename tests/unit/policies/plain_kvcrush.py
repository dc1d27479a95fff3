"""KVCrush plainly: lists, sets and sums, token by token."""

from fractions import Fraction
from math import floor

import numpy as np
import torch

from quire.policies.lots import lots_of
from quire.policies.signatures import anchors
from quire.policies.signatures.query_heads import by_query_head
from quire.policies.signatures.representatives import RANDOM
from unit.policies.histories import best, make_history


def history_of(tokens=60, group=3, seed=0, layers=(0, 2)):
    return make_history(tokens=tokens, group=group, seed=seed, layers=layers, ragged=False)


def of_layers(history, policy, keep, piece):
    """By layer: positions, scores [head][token], tokens that stay, what a head would keep."""
    view = history.view(policy.statistics)
    heads = by_query_head(view, policy.base.statistics)
    scores = policy.base.score(heads)
    protected = policy.protected(view, torch.full((len(view.positions),), keep - 2 * (piece - 1)))
    per_layer = history.heads * view.group
    for number, layer in enumerate(history.layers):
        lane = number * history.heads
        tokens = history.cached[lane]
        own = range(number * per_layer, (number + 1) * per_layer)
        of_head = [dict(zip(tokens, scores[head].tolist(), strict=False)) for head in own]
        must = {t for t, held in zip(tokens, protected[lane], strict=False) if held}
        yield layer, tokens, of_head, must, [set(best(s, must, keep)) for s in of_head]


def plain_distance(signature, anchor):
    return sum(a != b for a, b in zip(signature, anchor, strict=True))


def majority(signatures, width):
    return [2 * sum(s[i] for s in signatures) > len(signatures) for i in range(width)]


def plain_anchor(kind, signatures, layer, seed=0, number=0, count=1):
    """One of `count` anchors that do not depend on those there are."""
    width, total = len(signatures[0]), len(signatures)
    if kind == anchors.MEAN:
        return majority(signatures[number * total // count : (number + 1) * total // count], width)
    if kind == anchors.RANDOM:
        lots = lots_of(seed, torch.tensor(layer), number * width + torch.arange(width))
        return [lot % 2 == 1 for lot in lots.tolist()]
    return {
        anchors.ALTERNATING: [i % 2 == 1 for i in range(width)],
        anchors.ZEROS: [False] * width,
        anchors.ONES: [True] * width,
    }[kind]


def plain_anchors(policy, signatures, layer):
    kind, count = policy.anchor, policy.anchors
    if kind != anchors.FARTHEST:
        made = (plain_anchor(kind, signatures, layer, policy.seed, i, count) for i in range(count))
        return list(made)
    found = [majority(signatures, len(signatures[0]))]
    while len(found) < count:
        nearest = [min(plain_distance(s, anchor) for anchor in found) for s in signatures]
        found.append(signatures[nearest.index(max(nearest))])
    return found


def in_proportion(count, sizes):
    """Whole parts of `count`; the largest fractions are rounded up, the first of equal ones."""
    exact = [Fraction(count * size, sum(sizes)) for size in sizes]
    parts = [floor(part) for part in exact]
    by_fraction = sorted(range(len(sizes)), key=lambda i: (parts[i] - exact[i], i))
    for i in by_fraction[: count - sum(parts)]:
        parts[i] += 1
    return parts


def plain_slices(ordered, count, policy, layer):
    count, total = min(count, len(ordered)), len(ordered)
    cuts = [(i * total // count, (i + 1) * total // count) for i in range(count)]
    chosen = set()
    for first, end in cuts:
        place = (end - first - 1) // 2
        if policy.pick == RANDOM:
            lot = lots_of(policy.seed, torch.tensor(layer), torch.tensor(first))
            place = int(lot) % (end - first)
        chosen.add(ordered[first + place])
    return chosen


def plain_representatives(signature, count, policy, layer):
    """Of numbered signatures, those that stay."""
    made = plain_anchors(policy, list(signature.values()), layer)
    distances = {n: [plain_distance(s, anchor) for anchor in made] for n, s in signature.items()}
    near = {n: found.index(min(found)) for n, found in distances.items()}
    own = [[n for n in near if near[n] == i] for i in range(len(made))]
    chosen = set()
    for numbers, share in zip(own, in_proportion(count, list(map(len, own))), strict=True):
        ordered = sorted(numbers, key=lambda n: (min(distances[n]), n))
        chosen |= plain_slices(ordered, share, policy, layer)
    return chosen


def plain_count(policy, room, score):
    """How many of the units that stay are representatives."""
    count = floor(room * policy.share_of_all + 1e-9)
    if not getattr(policy, "dynamic", False):
        return count
    above = {n: s - min(score.values()) for n, s in score.items()}
    mass = sum(above[n] for n in best(above, [], room)) / sum(above.values())
    return floor(count * (1 - mass) / (1 - room / len(score)) + 1e-9)


def pieces_of(tokens, piece):
    return [tokens[i : i + piece] for i in range(0, len(tokens), piece)]


def plain_kvcrush(history, policy, keep, piece=1):
    """What stays in each layer."""
    kept = []
    for layer, tokens, of_head, must, would in of_layers(history, policy, keep, piece):
        cut = pieces_of(tokens, piece)
        held = [p for p in cut if must & set(p) or len(p) < piece]
        free = [p for p in cut if p not in held]
        room = min((keep - sum(map(len, held))) // piece, len(free))
        mean = {t: np.mean([scores[t] for scores in of_head]) for t in tokens}
        score = {number: sum(mean[t] for t in p) for number, p in enumerate(free)}
        count = plain_count(policy, room, score)
        promoted = best(score, [], room - count)
        grouped = [number for number in range(len(free)) if number not in promoted]
        signature = {n: [t in head for t in free[n] for head in would] for n in grouped}
        stays = set(promoted)
        if count:
            stays |= plain_representatives(signature, count, policy, layer)
        kept.append(sorted(t for p in [*held, *(free[n] for n in stays)] for t in p))
    return [layer for layer in kept for _ in range(history.heads)]
