"""Decoder layers whose weights lie outside of the device and are brought while others compute."""
