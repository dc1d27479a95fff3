"""`quire bench device`: what KV outside the device costs on this machine, beside arithmetic."""
