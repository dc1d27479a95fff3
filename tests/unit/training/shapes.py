"""A small model shape for the tests of the training script."""

from importlib.resources import files
from pathlib import Path

from training.config import ModelConfig

QUIRE_TINY = Path(str(files("quire") / "assets")) / "quire-tiny"
SMALL = ModelConfig(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)
