import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))

from golden.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
