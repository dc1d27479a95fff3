"""`quire serve`: the OpenAI-compatible server."""

from dataclasses import dataclass
from pathlib import Path

from quire.cli.kv_events import (
    kv_events_endpoint_option,
    kv_events_option,
    watching,
)
from quire.cli.on_ray import refuse_on_ray, refuse_ray_options, serve_on_ray
from quire.cli.options import KV, MODEL, RAY, ROUTER, SCHEDULE, SERVER
from quire.cli.settings import Settings, with_settings
from quire.layout.extras import require_extra
from quire.tenancy.tenants import parse_tenants


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeFlags:
    """Options of `quire serve`."""

    kv_events: Path | None = kv_events_option()
    kv_events_endpoint: str | None = kv_events_endpoint_option()


@with_settings(MODEL, KV, SCHEDULE, SERVER, RAY, ROUTER)
def serve(settings: Settings, *, flags: ServeFlags) -> None:
    """Serve a model over HTTP with an OpenAI-compatible API.

    With --ray, several engines serve it, each in a process of Ray, behind one address.
    """
    require_extra("serve", "quire serve")
    if settings.ray.enabled:
        refuse_on_ray("--kv-events", flags.kv_events)
        refuse_on_ray("--kv-events-endpoint", flags.kv_events_endpoint)
        serve_on_ray(settings)
        return
    refuse_ray_options(settings)
    # imported here: the web framework is not needed for --help
    from quire.serve.connection import bind
    from quire.serve.tenant_keys import TenantKeys, open_tenants

    config = settings.server
    specs = parse_tenants(settings.schedule.tenants)
    found = open_tenants(config, specs)
    keys = TenantKeys(found.keys, specs)
    config.check_files()
    config.key_of_metrics()  # checks the environment variable before the model is loaded
    # the port first: loading a model takes long
    with (
        bind(config.host, config.port) as bound,
        watching(flags.kv_events, flags.kv_events_endpoint) as watch,
    ):
        llm = settings.open_llm()
        watch.follow(llm)
        from quire.serve.app import run_server  # imports torch

        run_server(llm, bound, config, tenant_keys=keys, tenants=found)
