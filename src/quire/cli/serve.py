"""`quire serve`: the OpenAI-compatible server."""

from pathlib import Path
from typing import Annotated

import typer

from quire.cli.kv_events import KVEventsEndpoint, KVEventsFile, watching
from quire.cli.settings import Settings, with_settings
from quire.engine.tenants import parse_tenants


@with_settings()
def serve(
    settings: Settings,
    *,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=0, max=65535)] = 8000,
    served_model_name: Annotated[
        str | None, typer.Option(help="Name of the model in requests. Default: the model's own.")
    ] = None,
    tenant_keys: Annotated[
        Path | None,
        typer.Option(help="TOML file with the API keys of each tenant: they say who asks."),
    ] = None,
    kv_events: KVEventsFile = None,
    kv_events_endpoint: KVEventsEndpoint = None,
) -> None:
    """Serve a model over HTTP."""
    # loaded here: the web framework and torch are not needed for --help
    from quire.serve.app import run_server
    from quire.serve.tenant_keys import TenantKeys, read_tenant_keys

    own = {} if tenant_keys is None else read_tenant_keys(tenant_keys)
    keys = TenantKeys(own, parse_tenants(settings.schedule.tenants))
    with watching(kv_events, kv_events_endpoint) as watch:
        llm = settings.open_llm()
        watch.follow(llm)
        run_server(
            llm,
            host=host,
            port=port,
            served_model_name=served_model_name,
            tenant_keys=keys,
        )
