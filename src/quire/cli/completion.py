"""Values that the shell completes: policies, codecs, models and choices, without PyTorch.

Policies register themselves when their modules are imported, and these import PyTorch. Their names
are read from the text of the modules instead; rules of other packages are not completed.
"""

import re
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

from quire.layout.codec_names import AS_COMPUTED, CODECS, PAIRS
from quire.layout.packaged import NAMES

FULL = "full"
_CONFIG, _GGUF = "config.json", ".gguf"
_REGISTERED = re.compile(r'^@register(?:_budget)?\("(\w+)"\)', re.MULTILINE)


def policy_names() -> list[str]:
    """Names of the eviction policies of this package, `full` first."""
    return [FULL, *_registered_in("quire.policies")]


def budget_names() -> list[str]:
    """Names of the budgets of this package."""
    return sorted({"uniform", *_registered_in("quire.policies", "budgets")})


def codec_names() -> list[str]:
    """Names of codecs and of pairs of codecs; the default first."""
    return [AS_COMPUTED, *CODECS, *PAIRS]


def complete_policy(incomplete: str) -> list[str]:
    """Complete a policy or a budget, as `quire policies NAME` takes them."""
    return _starting(incomplete, [*policy_names(), *budget_names()])


def complete_rule(incomplete: str) -> list[str]:
    """Complete the value of --evict: every policy except `full` needs a cap."""
    rules = [name if name == FULL else f"{name}:cap=" for name in policy_names()]
    return _starting(incomplete, rules)


def complete_codec(incomplete: str) -> list[str]:
    """Complete a codec; after a slash the codec of values."""
    keys, slash, values = incomplete.rpartition("/")
    singles = [*CODECS] if slash else codec_names()
    return [f"{keys}{slash}{name}" for name in _starting(values, singles)]


def complete_model(incomplete: str) -> list[str]:
    """Complete short names, model folders, GGUF files, and folders on the way to them."""
    return _starting(incomplete, [*NAMES, *sorted(_model_paths(incomplete))])


def completer_of(flag: str, choices: tuple[str, ...]) -> Callable[[str], list[str]] | None:
    """Return the completer of an option; None without a list of values."""
    if choices:
        return lambda incomplete: _starting(incomplete, list(choices))
    return {"evict": complete_rule, "kv-codec": complete_codec}.get(flag)


def _starting(incomplete: str, names: list[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _registered_in(package: str, subfolder: str = "") -> list[str]:
    """Names that the modules of a folder register."""
    spec = find_spec(package)
    folders = [] if spec is None else [*(spec.submodule_search_locations or ())]
    found: set[str] = set()
    for folder in folders:
        for path in (Path(folder) / subfolder).glob("*.py"):
            found.update(_REGISTERED.findall(path.read_text(encoding="utf-8")))
    return sorted(found)


def _model_paths(incomplete: str) -> Iterator[str]:
    parent, slash, _ = incomplete.rpartition("/")
    folder = Path(parent or "/") if slash else Path()
    try:
        inside = [path for path in folder.iterdir() if not path.name.startswith(".")]
    except OSError:  # there is nothing to complete
        return
    for path in inside:
        written = f"{parent}{slash}{path.name}"
        if path.is_dir():
            yield written if (path / _CONFIG).is_file() else f"{written}/"
        elif path.suffix == _GGUF:
            yield written
