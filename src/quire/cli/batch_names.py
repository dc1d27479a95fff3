"""Names in the lines of a batch: duplicate `custom_id` or `id`, and models."""

import json
from dataclasses import dataclass
from typing import Any

_KEYS = ("custom_id", "id")


@dataclass(frozen=True, slots=True)
class RepeatedName:
    """A duplicate name.

    Attributes:
        key: custom_id or id.
        name: value of the key.
        earlier: number of the first line with the name.
        line: number of the second line with the name.
    """

    key: str
    name: str | int
    earlier: int
    line: int


class Names:
    """The names of all added lines.

    Attributes:
        first: the first duplicate name; None if all names are unique.
        num_repeated: number of lines with the name of an earlier line.
        models: names of models in the bodies of lines, to the number of the first such line.
    """

    def __init__(self) -> None:
        self.models: dict[str, int] = {}
        self.first: RepeatedName | None = None
        self.num_repeated = 0
        self._lines: dict[tuple[str, str | int], int] = {}

    def add(self, raw: bytes, number: int) -> None:
        """Record the names in a line; an invalid line has none."""
        if b'id"' not in raw and b'"model"' not in raw:
            return
        try:
            value = json.loads(raw.decode("utf-8-sig"))
        except (ValueError, RecursionError):  # the line gets an error record when it is run
            return
        for key in _KEYS if isinstance(value, dict) else ():
            name = value.get(key)
            if isinstance(name, str | int) and not isinstance(name, bool):
                self._note(key, name, number)
        if isinstance(value, dict):
            self._note_model(value, number)

    def _note_model(self, line: dict[str, Any], number: int) -> None:
        body = line.get("body", line)
        model = body.get("model") if isinstance(body, dict) else None
        if isinstance(model, str):
            self.models.setdefault(model, number)

    def _note(self, key: str, name: str | int, number: int) -> None:
        earlier = self._lines.setdefault((key, name), number)
        if earlier == number:
            return
        self.num_repeated += 1
        if self.first is None:
            self.first = RepeatedName(key, name, earlier, number)
