"""The model class `quire` of lm-evaluation-harness, and its command with this class registered.

    python -m quire.evals.lm_eval --model_args pretrained=quire-tiny,kv_memory=64MiB --tasks ...

takes the arguments of `lm_eval`. In Python, `QuireLM` is passed to the harness as its model. The
harness is imported when `QuireLM` is used; no other package imports it.
"""

from typing import TYPE_CHECKING, Any

from quire.layout.extras import require_extra

if TYPE_CHECKING:
    from quire.evals.lm_eval.model import QuireLM

__all__ = ["EXTRA", "NAME", "QuireLM"]

EXTRA = "lm-eval"
"""Extra that installs the harness."""

NAME = "quire"
"""Name of the model class in the harness."""


def __getattr__(name: str) -> Any:
    if name != "QuireLM":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require_extra(EXTRA, "quire.evals.lm_eval")
    from quire.evals.lm_eval.model import QuireLM

    return QuireLM
