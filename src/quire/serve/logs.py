"""Log lines of the server on standard error: as text, or as one JSON object per line."""

import json
import logging
import sys
import time
from typing import Literal

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

ROOT = "quire"


class TextFormatter(logging.Formatter):
    """Formats records as `TIME LEVEL LOGGER: message`, with the time in UTC."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        """Return the time of a record in UTC, in ISO 8601 with milliseconds."""
        seconds = time.strftime(datefmt or "%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        return f"{seconds}.{int(record.msecs):03d}Z"


class JsonFormatter(TextFormatter):
    """Formats records as JSON objects: time, level, logger, message, then the record's fields."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)  # in ASCII, without line boundaries of Unicode


def configure_logs(log_format: LogFormat = "text", level: LogLevel = "info") -> None:
    """Write the records of Quire's loggers to standard error; replaces an earlier configuration."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    for name in (ROOT, "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(level.upper())
        logger.propagate = False
    # uvicorn announces its start and shutdown, which the banner and the service do already
    logging.getLogger("uvicorn.error").setLevel(max(logging.WARNING, logger.level))
