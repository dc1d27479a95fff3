"""Quire beside Transformers on the same prompts, against the measured ceilings."""
