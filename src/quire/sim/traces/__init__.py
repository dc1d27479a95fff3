"""Formats of recorded requests, one per module; every module here is registered automatically."""

import importlib
import pkgutil


def load_all() -> None:
    """Import every module of this package, so that its formats are registered."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
