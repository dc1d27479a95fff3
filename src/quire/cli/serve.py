"""`quire serve`: the OpenAI-compatible server."""

from quire.cli.kv_events import KVEventsEndpoint, KVEventsFile, watching
from quire.cli.on_ray import refuse_on_ray, refuse_ray_options, serve_on_ray
from quire.cli.options import KV, MODEL, RAY, ROUTER, SCHEDULE, SERVER
from quire.cli.settings import Settings, with_settings
from quire.layout.extras import require_extra
from quire.tenancy.tenants import parse_tenants


@with_settings(MODEL, KV, SCHEDULE, SERVER, RAY, ROUTER)
def serve(
    settings: Settings,
    *,
    kv_events: KVEventsFile = None,
    kv_events_endpoint: KVEventsEndpoint = None,
) -> None:
    """Serve a model over HTTP with an OpenAI-compatible API.

    With --ray, several engines serve it, each in a process of Ray, behind one address.
    """
    require_extra("serve", "quire serve")
    if settings.ray.enabled:
        refuse_on_ray("--kv-events", kv_events)
        refuse_on_ray("--kv-events-endpoint", kv_events_endpoint)
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
        watching(kv_events, kv_events_endpoint) as watch,
    ):
        llm = settings.open_llm()
        watch.follow(llm)
        from quire.serve.app import run_server  # imports torch

        run_server(llm, bound, config, tenant_keys=keys, tenants=found)
