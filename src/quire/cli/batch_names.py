"""Names of the lines of a batch: which of them are not unique."""

import json
from dataclasses import dataclass

_KEYS = ("custom_id", "id")


@dataclass(frozen=True, slots=True)
class RepeatedName:
    """A name that two lines have.

    Attributes:
        key: custom_id or id.
        name: its value.
        earlier: number of the first line with it.
        line: number of the second.
    """

    key: str
    name: str | int
    earlier: int
    line: int


class Names:
    """The names of all lines that have been added.

    Attributes:
        first: the first repeated name; None where each line has its own.
        num_repeated: lines with a name that an earlier line has.
    """

    def __init__(self) -> None:
        self.first: RepeatedName | None = None
        self.num_repeated = 0
        self._lines: dict[tuple[str, str | int], int] = {}

    def add(self, raw: bytes, number: int) -> None:
        """Note the name of a line; a line that is no request has none."""
        if b'id"' not in raw:
            return
        try:
            value = json.loads(raw.decode("utf-8-sig"))
        except (ValueError, RecursionError):  # gets an error record when it is its turn
            return
        for key in _KEYS if isinstance(value, dict) else ():
            name = value.get(key)
            if isinstance(name, str | int) and not isinstance(name, bool):
                self._note(key, name, number)

    def _note(self, key: str, name: str | int, number: int) -> None:
        earlier = self._lines.setdefault((key, name), number)
        if earlier == number:
            return
        self.num_repeated += 1
        if self.first is None:
            self.first = RepeatedName(key, name, earlier, number)
