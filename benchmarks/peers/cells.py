"""Finished cells, one line of JSON each, so that an interrupted run can continue."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.json_lines import JsonLines
from benchmarks.peers.config import PeersConfig, Shape
from benchmarks.peers.engines import Engine
from benchmarks.peers.measures import Measures


@dataclass(frozen=True, slots=True, kw_only=True)
class CellKey:
    """Key of a cell: one process of one engine.

    Attributes:
        model, shape, engine: names.
        options: options of the engine's worker, as JSON text.
        round: number of the round.
        threads, dtype, max_num_batched_tokens: of the configuration.
        lengths: prompt and output tokens of each request, as JSON text.
        kv_share: size of the KV memory over what all requests need.
        commit: commit of the code; None outside a checkout.
    """

    model: str
    shape: str
    engine: str
    options: str
    round: int
    threads: int
    dtype: str
    max_num_batched_tokens: int
    lengths: str
    kv_share: float
    commit: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A finished cell: numbers, or an error.

    Attributes:
        key: key of the cell.
        measures: its numbers; None after an error.
        error: the error; "" if there is none.
    """

    key: CellKey
    measures: Measures | None
    error: str = ""

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> "Cell":
        """Convert from the JSON values of `to_json`."""
        found = stored["measures"]
        return cls(
            key=CellKey(**stored["key"]),
            measures=None if found is None else Measures(**found),
            error=stored["error"],
        )


def cell_key(
    config: PeersConfig, model: str, shape: Shape, engine: Engine, round_: int, commit: str | None
) -> CellKey:
    """Key of a cell."""
    return CellKey(
        model=model,
        shape=shape.name,
        engine=engine.name,
        options=json.dumps(engine.options, sort_keys=True),
        round=round_,
        threads=config.threads,
        dtype=config.dtype,
        max_num_batched_tokens=config.max_num_batched_tokens,
        lengths=json.dumps(shape.lengths),
        kv_share=shape.kv_share,
        commit=commit,
    )


class Cells:
    """Store of cells without errors: a resumed run repeats the failed ones.

    Args:
        path: path of the file, created with the first cell; None: nothing is stored.
    """

    def __init__(self, path: Path | None) -> None:
        self._lines = JsonLines(path)
        self._known: dict[CellKey, Cell] = {}
        for stored in self._lines.read():
            try:
                cell = Cell.from_json(stored)
            except (KeyError, TypeError):
                continue  # of another version
            self._known[cell.key] = cell

    def find(self, key: CellKey) -> Cell | None:
        """The stored cell, if there is one."""
        return self._known.get(key)

    def add(self, cell: Cell) -> None:
        """Store a cell, unless it failed."""
        if cell.measures is not None:
            self._known[cell.key] = cell
            self._lines.add(cell.to_json())


def interleaved(engines: Sequence[Engine], repeats: int) -> Iterator[tuple[int, Engine]]:
    """Rounds of all engines; each round starts one engine later, so that none is always first."""
    for round_ in range(repeats):
        first = round_ % len(engines)
        for engine in (*engines[first:], *engines[:first]):
            yield round_, engine
