"""The model class `quire` of lm-evaluation-harness, and its command with this class registered.

    python -m quire.evals.lm_eval --model_args pretrained=quire-tiny,kv_memory=64MiB --tasks ...

takes the arguments of `lm_eval`. In Python, `QuireLM` is passed to the harness as its model. The
harness is imported when `QuireLM` is used; no other package imports it.
"""

import importlib.util
from typing import TYPE_CHECKING, Any

from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.evals.lm_eval.model import QuireLM

__all__ = ["NAME", "QuireLM", "require_harness"]

NAME = "quire"
"""Name of the model class in the harness."""


def require_harness() -> None:
    """Check that lm-evaluation-harness is installed.

    Raises:
        ConfigError: it is not; the message has the pip command.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError(
            "quire.evals.lm_eval needs lm-evaluation-harness (not installed): pip install lm_eval"
        )


def __getattr__(name: str) -> Any:
    if name != "QuireLM":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require_harness()
    from quire.evals.lm_eval.model import QuireLM

    return QuireLM
