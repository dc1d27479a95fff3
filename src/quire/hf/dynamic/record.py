"""What a step of a dynamic batch did: tokens for the user, numbers for benches."""

from dataclasses import dataclass, field
from typing import NamedTuple

from quire.hf.dynamic.query import Query


class NewToken(NamedTuple):
    """A token of a query.

    Attributes:
        query: whose.
        token_id: which.
    """

    query: Query
    token_id: int


@dataclass(slots=True)
class ReadRecord:
    """A forward over prompts.

    Attributes:
        rows, columns: of it, pads counted.
        seen: columns before it.
        seconds: it took, sampling left out.
    """

    rows: int
    columns: int
    seen: int
    seconds: float


@dataclass(slots=True)
class StepRecord:
    """One step.

    Attributes:
        rows: of the slab, empty ones and those that have ended included; 0 where none decoded.
        live: rows that went on.
        columns: that attention saw.
        new_columns: of the forward; more than 1 where prompts were read by it.
        valid_tokens: sum of the live rows' lengths.
        queued: whether others waited when it decoded.
        decode_s: the forward and choosing tokens.
        reads: prompts read apart.
        kv_bytes: held at the end.
    """

    rows: int = 0
    live: int = 0
    columns: int = 0
    new_columns: int = 0
    valid_tokens: int = 0
    queued: bool = False
    decode_s: float = 0.0
    reads: list[ReadRecord] = field(default_factory=list)
    kv_bytes: int = 0
