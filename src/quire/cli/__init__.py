"""Commands: parse arguments into a configuration and run. `--help` does not import torch."""
