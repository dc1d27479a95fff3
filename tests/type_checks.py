"""Types are checked at every call of quire that a test makes, shapes where a signature has them.

`jaxtyping` binds the arguments of every function it wraps: five times what the scheduler itself
takes. So it gets the modules with shapes in their signatures, and beartype alone gets the others.
"""

from pathlib import Path

from beartype import BeartypeConf
from beartype.claw import beartype_package
from jaxtyping import install_import_hook

SOURCES = Path(__file__).parents[1] / "src"


def check_types() -> None:
    """Check what is imported of quire from here on."""
    beartype_package("quire", conf=BeartypeConf(claw_is_pep526=False))
    install_import_hook(_with_shapes(), "beartype.beartype")  # before beartype's: it is asked first


def _with_shapes() -> list[str]:
    """Names of the modules that import jaxtyping."""
    paths = sorted(SOURCES.glob("quire/**/*.py"))
    return [_name(path) for path in paths if "jaxtyping" in path.read_text()]


def _name(path: Path) -> str:
    return ".".join(path.relative_to(SOURCES).with_suffix("").parts)
