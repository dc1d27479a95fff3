"""Starts and stops Ray for `quire serve --ray` and `quire batch --ray`."""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager

from quire.scale.config import RayConfig

_VARIABLES = {
    # Ray kills an HTTP proxy that starts slowly, as on a machine whose cores are busy
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "300",
    # Ray lowers the CPU priority of its workers; these serve requests like `quire serve`
    "RAY_worker_niceness": "0",
}
"""Settings of a Ray that is started here, unless the environment has its own."""


@contextmanager
def ray_session(config: RayConfig) -> Iterator[None]:
    """Connect to a Ray cluster, or start Ray on this machine; disconnect or stop it at the end."""
    import ray

    if config.address is None:
        for name, value in _VARIABLES.items():
            os.environ.setdefault(name, value)
        reserved = math.ceil(config.max_replicas * config.cpus)
        ray.init(
            address="local",
            num_cpus=max(os.cpu_count() or 1, reserved),
            object_store_memory=config.object_store_memory,
            include_dashboard=False,
            log_to_driver=True,
            configure_logging=False,
        )
    else:
        ray.init(address=config.address, log_to_driver=True, configure_logging=False)
    try:
        yield
    finally:
        ray.shutdown()
