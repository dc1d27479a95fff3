"""Servers and commands on Ray in processes of their own: Ray cannot send checks of types."""

import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress

import httpx
import psutil
import pytest

START_S = 300.0
QUICK = ("--dtype=float32", "--kv-memory=16MiB", "--no-verify", "--threads=1")
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # loads are reported often, so that tests of scaling need not wait
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
    "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
}
_ENGINE = "ray::ServeReplica:quire:engine"
_NAME = re.compile(r'quire_kv_memory_bytes{replica="(\w+)"')


def require_ray():
    missing = "Ray is not installed: pip install 'quire-llm[ray,serve]'"
    pytest.importorskip("pyarrow", reason=missing)
    if not any(os.path.isdir(os.path.join(path, "ray", "serve")) for path in sys.path):
        pytest.skip(missing, allow_module_level=True)


def python(*arguments, **options):
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | ENVIRONMENT,
        **options,
    )


def free_port():
    """A free port below those that the system chooses: Ray's processes take many of these."""
    for port in random.sample(range(20_000, 30_000), 100):
        with socket.socket() as found, suppress(OSError):
            found.bind(("127.0.0.1", port))
            return port
    raise AssertionError("100 ports are in use")


class RayServer:
    """`quire serve --ray` in a process; `url` is without /v1."""

    def __init__(self, *options, log):
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        arguments = ["serve", "quire-tiny", "--ray", "--ray-cpus=0.5", f"--port={port}", *QUICK]
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "quire", *arguments, *map(str, options)],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | ENVIRONMENT,
            )

    def replicas(self):
        with suppress(httpx.TransportError):
            return set(_NAME.findall(httpx.get(f"{self.url}/metrics", timeout=20).text))
        return set()

    def wait_for(self, number, *, without=()):
        """Wait until so many engines run, none of them one of `without`; return their names."""
        deadline_s = time.monotonic() + START_S
        while True:
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline_s, self.log.read_text()[-9000:]
            names = self.replicas()
            if len(names) == number and not names & set(without):
                return names
            time.sleep(0.1)

    def kill_engine(self):
        family = psutil.Process(self.process.pid).children(recursive=True)
        engines = [found for found in family if found.cmdline()[:1] == [_ENGINE]]
        engines = engines or [found for found in family if _ENGINE in " ".join(found.cmdline())]
        engines[0].send_signal(signal.SIGKILL)
        return engines[0].pid

    def stop(self):
        """Stop it by SIGTERM; return the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(START_S)


@contextmanager
def ray_server(folder, replicas, *options):
    """Run `quire serve --ray` until its first engines accept requests; the log is in the folder."""
    server = RayServer(f"--ray-replicas={replicas}", *options, log=folder / "server.log")
    try:
        server.wait_for(int(replicas.partition(":")[0]))
        yield server
    finally:
        server.stop()
