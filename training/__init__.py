"""Training of quire-tiny, the model for comparing eviction rules. Not part of the package."""
