"""Hypothesis profiles: `HYPOTHESIS_PROFILE=deep pytest ...` or `--hypothesis-profile=deep`."""

import os

import torch
from hypothesis import HealthCheck, settings

slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile(
    "dev", max_examples=50, stateful_step_count=40, deadline=None, suppress_health_check=slow
)
settings.register_profile(
    "ci", max_examples=100, deadline=None, derandomize=True, suppress_health_check=slow
)
settings.register_profile(  # a state machine takes max_examples * stateful_step_count steps
    "deep",
    max_examples=2_500,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=slow,
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))

torch.set_num_threads(1)  # pytest-xdist runs one worker on each core
