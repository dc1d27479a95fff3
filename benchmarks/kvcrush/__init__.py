"""KVCrush beside the rules it stands around: what it is worth, and what it costs."""
