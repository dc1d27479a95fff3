"""KVCrush compared with its base eviction rules: quality and cost."""
