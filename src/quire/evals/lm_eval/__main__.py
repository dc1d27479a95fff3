"""`python -m quire.evals.lm_eval`: the command of lm-evaluation-harness, with `--model quire`."""

import sys
from collections.abc import Sequence

from quire.errors import QuireError
from quire.evals.lm_eval import EXTRA, NAME
from quire.layout.extras import require_extra

RUN = "run"


def with_model(arguments: Sequence[str]) -> list[str]:
    """Arguments of a run with `--model quire`, if they name no model and no config file."""
    runs = bool(arguments) and (arguments[0] == RUN or arguments[0].startswith("-"))
    names = {text.partition("=")[0] for text in arguments}
    if not runs or names & {"--help", "-h", "--model", "-M", "--config", "-C"}:
        return [*arguments]
    return [RUN, "--model", NAME, *arguments[arguments[0] == RUN :]]


def main() -> None:
    """Run the command of the harness."""
    try:
        require_extra(EXTRA, "quire.evals.lm_eval")
        from lm_eval.__main__ import cli_evaluate

        import quire.evals.lm_eval.model  # noqa: F401 - registers the model class

        sys.argv[1:] = with_model(sys.argv[1:])
        cli_evaluate()
    except QuireError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
