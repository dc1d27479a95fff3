"""Sampling: logits, sampler, stop rules, detokenizer, beams and outputs."""
