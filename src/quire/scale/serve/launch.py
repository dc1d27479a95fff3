"""Starts and stops Ray Serve for `quire serve --ray`."""

import math
import signal
import sys
import threading
import time
from types import FrameType

from quire.errors import EngineDead
from quire.scale.ray_session import ray_session
from quire.scale.serve.application import application
from quire.scale.serve.recipe import ServeRecipe

APPLICATION = "quire"
"""Name of the application in Ray Serve."""

PROXY_WAIT_S, POLL_S = 240.0, 0.5
"""Longest wait for an HTTP proxy after Ray's own wait of a minute, and the interval of checks."""


def serve_until_signal(recipe: ServeRecipe) -> None:
    """Serve with Ray until SIGTERM or SIGINT, then finish open requests.

    On a cluster, the application is deleted at the end and the cluster goes on.
    """
    from ray import serve

    with ray_session(recipe.ray):
        start_serve(recipe)
        run_application(recipe)
        stop = _signals()  # Ray has set its own handlers meanwhile
        sys.stdout.write(_banner(recipe))
        sys.stdout.flush()
        stop.wait()
        serve.delete(APPLICATION)
        if recipe.ray.address is None:
            serve.shutdown()


def _banner(recipe: ServeRecipe) -> str:
    server, engine = recipe.server, recipe.engine
    scheme = "https" if server.ssl_certfile else "http"
    host = f"[{server.host}]" if ":" in server.host else server.host
    return (
        f"Replicas on Ray: {recipe.ray.replicas}, router: {recipe.routing.name}\n"
        f"Serving {server.served_model_name or engine.model} at {scheme}://{host}:{server.port}/v1\n"
    )


def start_serve(recipe: ServeRecipe) -> None:
    """Start Ray Serve with an HTTP proxy at the server's address."""
    from ray import serve
    from ray.serve.config import HTTPOptions

    server = recipe.server
    options = HTTPOptions(
        host=server.host,
        port=server.port,
        keep_alive_timeout_s=math.ceil(server.timeout_keep_alive),
        ssl_certfile=server.ssl_certfile,
        ssl_keyfile=server.ssl_keyfile or server.ssl_certfile,
        ssl_ca_certs=server.ssl_ca_certs,
    )
    location = "HeadOnly" if recipe.ray.address is None else "EveryNode"
    try:
        serve.start(proxy_location=location, http_options=options)
    except TimeoutError:
        # Ray waits for a minute; its controller goes on starting the proxies of a busy machine
        serve.start(proxy_location=location, http_options=options)


def run_application(recipe: ServeRecipe) -> None:
    """Create the replicas and wait until the proxies send requests to them."""
    from ray import serve

    try:
        serve.run(application(recipe), name=APPLICATION, route_prefix="/")
    except TimeoutError:
        _wait_for_proxies(time.monotonic() + PROXY_WAIT_S)


def _wait_for_proxies(deadline_s: float) -> None:
    from ray import serve

    while not any(proxy.value == "HEALTHY" for proxy in serve.status().proxies.values()):
        if time.monotonic() > deadline_s:
            raise EngineDead(
                f"Ray's HTTP proxy has not started in {PROXY_WAIT_S:.0f} s, as on a machine whose "
                "cores are busy: free cores, or lower --ray-replicas"
            )
        time.sleep(POLL_S)


def _signals() -> threading.Event:
    """An event that SIGTERM and SIGINT set; a second signal ends the process."""
    stop = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)
    return stop
