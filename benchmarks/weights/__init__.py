"""Quality, bytes and decode time of quantized weights."""
