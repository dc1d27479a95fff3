"""Repeated random tokens: dense training data for previous-token and induction heads.

Without it a small model predicts only the digit prior for hundreds of steps; with it and the
structured start, recall appears at about step 170.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

FIRST_PLAIN_TOKEN = 3
"""Token ids below this are special tokens."""


@dataclass(slots=True)
class Piece:
    """Token ids, their loss weights and their kind of task."""

    kind: str
    ids: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)

    def cut(self, size: int) -> "Piece":
        """The first `size` tokens."""
        return Piece(self.kind, self.ids[:size], self.weights[:size])


def _passages(rng: random.Random, size: int, pool: Sequence[int]) -> Piece:
    """One repeated passage; every repetition can be predicted."""
    piece = Piece("repeat")
    length = rng.randrange(4, max(5, min(size // 2, 200)))
    passage = [rng.choice(pool) for _ in range(length)]
    while len(piece.ids) < size:
        piece.weights += [1.0 if piece.ids else 0.0] * length
        piece.ids += passage
    return piece.cut(size)


def _pairs(rng: random.Random, size: int, pool: Sequence[int], plain: range) -> Piece:
    """Key-value pairs, then the same pairs in new orders; only values can be predicted."""
    piece = Piece("pairs")
    count = max(2, rng.randrange(2, max(3, min(size // 4, 128))))
    keys = rng.sample(plain, count)
    table = {key: rng.choice(pool) for key in keys}
    while len(piece.ids) < size:
        known = 1.0 if piece.ids else 0.0
        rng.shuffle(keys)
        for key in keys:
            piece.ids += [key, table[key]]
            piece.weights += [0.0, known]
    return piece.cut(size)


def primer_piece(rng: random.Random, size: int, vocab_size: int) -> Piece:
    """`size` tokens of repeated passages or repeated pairs."""
    plain = range(FIRST_PLAIN_TOKEN, vocab_size)
    pool: Sequence[int] = plain
    if rng.random() >= 0.6:
        pool = rng.sample(plain, rng.choice([16, 64, 256]))
    if rng.random() < 0.5:
        return _passages(rng, size, pool)
    return _pairs(rng, size, pool, plain)
