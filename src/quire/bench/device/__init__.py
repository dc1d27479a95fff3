"""`quire bench device`: what KV outside the device costs on this very machine, beside arithmetic."""
