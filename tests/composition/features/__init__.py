"""The registry of features."""

from composition.feature import Feature
from composition.features import (
    eviction,
    memory,
    models,
    sampling,
    scheduling,
    storing,
    transformers,
)

FEATURES: tuple[Feature, ...] = (
    *eviction.FEATURES,
    *storing.FEATURES,
    *memory.FEATURES,
    *scheduling.FEATURES,
    *sampling.FEATURES,
    *models.FEATURES,
    *transformers.FEATURES,
)
