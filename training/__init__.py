"""The training of quire-tiny, the model that judges eviction rules. Not part of the package."""
