"""The command `quire`, also as `python -m quire`."""

import sys


def run() -> None:
    """Run the command line; Ctrl-C while its modules are imported ends it with one line."""
    try:
        from quire.cli.main import run as run_command
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)
    run_command()


if __name__ == "__main__":
    run()
