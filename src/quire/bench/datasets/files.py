"""Files of data sets."""

from pathlib import Path

from quire.bench.config import BenchServeConfig
from quire.errors import ConfigError


def dataset_file(config: BenchServeConfig) -> Path:
    """The file of the data set.

    Raises:
        ConfigError: no file is named.
    """
    if config.dataset_path is None:
        raise ConfigError(f"--dataset-name {config.dataset_name} needs --dataset-path FILE")
    return Path(config.dataset_path)
