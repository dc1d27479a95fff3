"""Optional dependencies: which packages each extra installs, and the error if one is missing."""

import importlib.util
from types import MappingProxyType

from quire.errors import ConfigError

DISTRIBUTION = "quire-llm"
"""Name on the package index; the import name is `quire`."""

EXTRAS = MappingProxyType(
    {
        "serve": (
            *("fastapi", "fastapi_swagger", "h11", "prometheus_client", "pydantic", "uvicorn"),
        ),
        "events": ("zmq", "msgpack"),
        "kmeans": ("scipy",),
        "lm-eval": ("lm_eval",),
        "ray": ("ray", "pyarrow"),
        "redis": ("redis",),
        "report": ("matplotlib",),
        "structured": ("llguidance",),
        "tracing": ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"),
    }
)
"""Import names of the packages of each extra in pyproject.toml."""


def require_extra(extra: str, feature: str) -> None:
    """Check that the packages of an extra are installed, before work that needs them.

    Args:
        extra: a key of EXTRAS.
        feature: what needs the packages: a command or an option.

    Raises:
        ConfigError: a package is missing; the message has the pip command.
    """
    missing = _missing(extra)
    if missing:
        raise ConfigError(
            f"{feature} needs {', '.join(missing)} (not installed): {install_command(extra)}"
        )


def has_extra(extra: str) -> bool:
    """Whether the packages of an extra are installed."""
    return not _missing(extra)


def _missing(extra: str) -> list[str]:
    return [name for name in EXTRAS[extra] if not _installed(name)]


def install_command(extra: str) -> str:
    """Return the command that installs the packages of an extra."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # hidden by a test, or a module without a spec
        return False
