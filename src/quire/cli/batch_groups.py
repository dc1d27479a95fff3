"""Groups of records of `quire batch`, written together."""

import time
from collections.abc import Mapping
from typing import Any

from quire.cli.batch_output import BatchOutput

GROUP_RECORDS = 32
GROUP_S = 0.5
"""A group is written when it has `GROUP_RECORDS` records, or after `GROUP_S` seconds."""


class RecordGroups:
    """Writes records in groups, because each write waits for the disk.

    Args:
        output: the output file.
    """

    def __init__(self, output: BatchOutput) -> None:
        self._output = output
        self._written_s = time.monotonic()

    def put(self, record: Mapping[str, Any]) -> None:
        """Add a record; write the group if it is complete.

        Raises:
            ConfigError: the output can no longer be written.
        """
        self._output.write([record])
        if self._output.num_held >= GROUP_RECORDS or self._waited_s >= GROUP_S:
            self._flush()

    def flush_if_due(self) -> None:
        """Write a group that has waited for long enough.

        Raises:
            ConfigError: the output can no longer be written.
        """
        if self._output.num_held and self._waited_s >= GROUP_S:
            self._flush()

    @property
    def _waited_s(self) -> float:
        return time.monotonic() - self._written_s

    def _flush(self) -> None:
        self._output.flush()
        self._written_s = time.monotonic()
