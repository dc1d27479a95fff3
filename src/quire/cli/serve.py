"""`quire serve`: the OpenAI-compatible server."""

import os
from pathlib import Path

from quire.cli.kv_events import KVEventsEndpoint, KVEventsFile, watching
from quire.cli.options import KV, MODEL, SCHEDULE, SERVER
from quire.cli.settings import Settings, with_settings
from quire.layout.extras import require_extra
from quire.tenancy.tenants import parse_tenants


@with_settings(MODEL, KV, SCHEDULE, SERVER)
def serve(
    settings: Settings,
    *,
    kv_events: KVEventsFile = None,
    kv_events_endpoint: KVEventsEndpoint = None,
) -> None:
    """Serve a model over HTTP with an OpenAI-compatible API."""
    require_extra("serve", "quire serve")
    # imported here: the web framework and torch are not needed for --help
    from quire.serve.app import run_server
    from quire.serve.config import KEY_VARIABLE
    from quire.serve.connection import bind
    from quire.serve.tenant_file import TenantFile, read_tenant_keys, with_default_keys
    from quire.serve.tenant_keys import TenantKeys

    config = settings.server
    path = config.tenant_keys
    found = TenantFile() if path is None else read_tenant_keys(Path(path))
    own_keys = config.api_key or tuple(filter(None, (os.environ.get(KEY_VARIABLE),)))
    found = with_default_keys(found, own_keys)
    keys = TenantKeys(found.keys, parse_tenants(settings.schedule.tenants))
    # the port first: loading a model takes long
    with (
        bind(config.host, config.port) as bound,
        watching(kv_events, kv_events_endpoint) as watch,
    ):
        llm = settings.open_llm()
        watch.follow(llm)
        run_server(llm, bound, config, tenant_keys=keys, tenants=found)
