"""`python -m tests.models.sweep [TYPE ...]`, run in the repository's root."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from models.command import main

if __name__ == "__main__":
    sys.exit(main())
