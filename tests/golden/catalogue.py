"""All golden cases and all stored formats: importing the modules that make them registers them."""

from golden import (  # noqa: F401 - they register
    of_benchmarks,
    of_commands,
    of_engine,
    of_formats,
    of_server,
)
from golden.cases import CASES
from golden.stored import STORED

__all__ = ["CASES", "STORED"]
