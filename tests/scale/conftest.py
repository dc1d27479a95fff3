"""Fixtures of tests on Ray: one Ray with a small object store for a module."""

import os
from pathlib import Path

import pytest

from support.ray_processes import require_ray

SOURCES = str(Path(__file__).parents[2] / "src")
STORE = 200 * 2**20


@pytest.fixture(scope="session")
def ray_environment():
    """Environment variables of every process of Ray: the sources of this checkout, no reports."""
    paths = [SOURCES, os.environ.get("PYTHONPATH", "")]
    changed = {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        # load is reported every second, so that tests of scaling need not wait
        "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
        "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in changed.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def local_ray(ray_environment):
    """A Ray on this machine, stopped at the end of the module."""
    ray = require_ray()
    ray.init(
        address="local",
        num_cpus=4,
        object_store_memory=STORE,
        include_dashboard=False,
        log_to_driver=False,
    )
    yield ray
    ray.shutdown()
