"""The pooling that a model was trained with, as sentence-transformers stores it."""

import json
from pathlib import Path

from quire.config.sampling_params import Pooling
from quire.errors import RequestError

FILE = Path("1_Pooling") / "config.json"
_MODES: dict[str, Pooling] = {"pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean"}
_PREFIX = "pooling_mode_"


def model_pooling(folder: Path | None) -> Pooling:
    """The pooling of a model folder; "last" without a config, as for decoders in general."""
    path = None if folder is None else folder / FILE
    if path is None or not path.is_file():
        return "last"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RequestError(
            f"{FILE} of the model cannot be read: {error}", param="pooling"
        ) from None
    named = config if isinstance(config, dict) else {}
    modes = [name for name, value in named.items() if name.startswith(_PREFIX) and value is True]
    if len(modes) != 1 or modes[0] not in _MODES:
        shown = ", ".join(modes) or "none"
        raise RequestError(
            f"{FILE} of the model names the pooling {shown}, expected one of {', '.join(_MODES)}: "
            "set the pooling of the request",
            param="pooling",
        )
    return _MODES[modes[0]]
