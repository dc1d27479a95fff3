"""`python -m quire`: the command line, where the script `quire` is not on the path."""

from quire.cli.main import run

if __name__ == "__main__":
    run()
