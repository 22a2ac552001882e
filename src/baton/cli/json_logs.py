"""The log of a server as JSON, one object a line: text log lines, HTTP responses, ended requests."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import Any

import msgspec


class JsonFormatter(logging.Formatter):
    """Writes a record as one line of JSON. `fields` of the record are further keys."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without its end."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **record.__dict__.get("fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def log_as_json() -> None:
    """Let all loggers of this process write JSON to standard output, Baton's own from the level INFO on."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(JsonFormatter())
    logging.getLogger().addHandler(handler)
    logging.getLogger("baton").setLevel(logging.INFO)
