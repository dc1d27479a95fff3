"""Batches: books, tasks and the primer, packed into rows. Seed, step and row determine a row."""

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from tokenizers import Tokenizer
from torch import Tensor

from quire.errors import ConfigError
from quire.evals.tasks import BookFiller, Setting, Span, build, names
from training.config import DOCUMENT
from training.primer import Piece, primer_piece
from training.schedule import Stage

KINDS = (*names(), "repeat", "pairs", "text")
_TEXT_WEIGHT = 0.6
_SMALLEST_TASK_TOKENS = 40
_CHARACTERS_PER_TOKEN = 3.6


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of the sequence length plus one token, so that each token has a target.

    Attributes:
        ids: token ids.
        weights: loss weight of each token as a target.
        kinds: index into KINDS of the task of each token.
    """

    ids: Int[Tensor, "row token"]
    weights: Float[Tensor, "row token"]
    kinds: Int[Tensor, "row token"]


def rough_tokens(text: str) -> int:
    """Estimate the tokens of ASCII text: 1 per digit, 0.31 per other character."""
    digits = sum(map(text.count, "0123456789"))
    return int(digits + (len(text) - digits) / 3.25) + 1


def encode_spans(tokenizer: Tokenizer, kind: str, spans: tuple[Span, ...]) -> Piece:
    """Token ids of the joined text; a token has the weight of the span that contains its end."""
    encoding = tokenizer.encode("".join(text for text, _ in spans), add_special_tokens=False)
    ends = np.cumsum([len(text) for text, _ in spans])
    stops = np.fromiter((stop for _, stop in encoding.offsets), np.int64, len(encoding.ids))
    span_of_token = np.searchsorted(ends, stops, side="left").clip(max=len(spans) - 1)
    weights = np.array([weight for _, weight in spans])[span_of_token]
    return Piece(kind, list(encoding.ids), weights.tolist())


def _document_id(tokenizer: Tokenizer) -> int:
    found = tokenizer.token_to_id(DOCUMENT)
    if found is None:
        raise ConfigError(f"expected the token {DOCUMENT} in the tokenizer, found none; retrain it")
    return found


class BatchMaker:
    """Generates batches; equal arguments give equal batches, independent of earlier calls."""

    def __init__(
        self, tokenizer: Tokenizer, book_text: str, mixture: Mapping[str, float], seed: int
    ) -> None:
        self.tokenizer = tokenizer
        self.filler = BookFiller(book_text)
        self.mixture = dict(mixture)
        self.seed = seed
        self.document_id = _document_id(tokenizer)

    def batch(self, step: int, stage: Stage, primer_share: float) -> Batch:
        """Rows of one step."""
        rows = [
            self._row(random.Random(f"{self.seed}/{step}/{row}"), stage.length + 1, primer_share)
            for row in range(stage.rows)
        ]
        ids, weights, kinds = zip(*rows, strict=True)
        return Batch(torch.tensor(ids), torch.tensor(weights), torch.tensor(kinds))

    def _row(
        self, rng: random.Random, tokens: int, primer_share: float
    ) -> tuple[list[int], list[float], list[int]]:
        ids: list[int] = []
        weights: list[float] = []
        kinds: list[int] = []
        while len(ids) < tokens:
            piece = self._piece(rng, tokens - len(ids), primer_share)
            ids += [self.document_id, *piece.ids]
            weights += [0.0, *piece.weights]
            kinds += [KINDS.index(piece.kind)] * (len(piece.ids) + 1)
        return ids[:tokens], weights[:tokens], kinds[:tokens]

    def _piece(self, rng: random.Random, room: int, primer_share: float) -> Piece:
        if room > 24 and rng.random() < primer_share:
            size = room if rng.random() < 0.5 else rng.randrange(16, room)
            return primer_piece(rng, size - 1, self.tokenizer.get_vocab_size())
        # Half of the rows are one long task, half are packed from shorter ones, so that recall in
        # short contexts is not lost.
        size = room
        if room >= 64 and rng.random() >= 0.5:
            size = int(math.exp(rng.uniform(math.log(48), math.log(room))))
        kind, spans = self._spans(rng, size - 1)
        return encode_spans(self.tokenizer, kind, spans)

    def _spans(self, rng: random.Random, tokens: int) -> tuple[str, tuple[Span, ...]]:
        kind = rng.choices(list(self.mixture), list(self.mixture.values()))[0]
        if kind == "text" or tokens < _SMALLEST_TASK_TOKENS:
            text = self.filler(rng, int(tokens * _CHARACTERS_PER_TOKEN))
            return "text", ((text, _TEXT_WEIGHT),)
        setting = Setting(
            tokens=int(tokens * 0.97),
            filler=self.filler,
            measure=rough_tokens,
            split="train",
            queries=None,
        )
        return kind, build(kind, rng, setting).training_spans()
