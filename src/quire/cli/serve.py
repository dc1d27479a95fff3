"""`quire serve`: the OpenAI-compatible server."""

import os
from collections.abc import Sequence
from pathlib import Path

from quire.cli.kv_events import KVEventsEndpoint, KVEventsFile, watching
from quire.cli.options import KV, MODEL, SCHEDULE, SERVER
from quire.cli.settings import Settings, with_settings
from quire.config.generation_request import DEFAULT_TENANT
from quire.errors import ConfigError
from quire.layout.extras import require_extra
from quire.serve.config import KEY_VARIABLE, ServerConfig
from quire.tenancy.tenants import TenantSpec, parse_tenants


@with_settings(MODEL, KV, SCHEDULE, SERVER)
def serve(
    settings: Settings,
    *,
    kv_events: KVEventsFile = None,
    kv_events_endpoint: KVEventsEndpoint = None,
) -> None:
    """Serve a model over HTTP with an OpenAI-compatible API."""
    require_extra("serve", "quire serve")
    # imported here: the web framework is not needed for --help
    from quire.serve.connection import bind
    from quire.serve.tenant_file import (
        TenantFile,
        read_tenant_keys,
        require_keys,
        with_default_keys,
    )
    from quire.serve.tenant_keys import TenantKeys

    config = settings.server
    path = config.tenant_keys
    found = TenantFile() if path is None else read_tenant_keys(Path(path))
    specs = parse_tenants(settings.schedule.tenants)
    found = with_default_keys(found, _default_keys(config, specs))
    if path is not None:
        require_keys(found, Path(path))
    keys = TenantKeys(found.keys, specs)
    _refuse_unreadable(config)
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


def _default_keys(config: ServerConfig, specs: Sequence[TenantSpec]) -> tuple[str, ...]:
    """Keys of the default tenant: those of `--api-key` and of the environment.

    Raises:
        ConfigError: the engine has other tenants only.
    """
    own = os.environ.get(KEY_VARIABLE)
    keys = (*config.api_key, *([own] if own else []))
    names = [spec.name for spec in specs]
    if keys and names and DEFAULT_TENANT not in names:
        source = "--api-key" if config.api_key else f"the environment variable {KEY_VARIABLE}"
        raise ConfigError(
            f"{source} has a key of tenant {DEFAULT_TENANT!r}, but --tenants only names "
            f"{', '.join(sorted(names))}: put their keys into --tenant-keys FILE, or add "
            f"{DEFAULT_TENANT!r} to --tenants"
        )
    return keys


def _refuse_unreadable(config: ServerConfig) -> None:
    """Refuse files of options that cannot be read, before the model is loaded.

    Raises:
        ConfigError: a certificate, key or chat template that cannot be opened.
    """
    files = {
        "--ssl-certfile": config.ssl_certfile,
        "--ssl-keyfile": config.ssl_keyfile,
        "--ssl-ca-certs": config.ssl_ca_certs,
        "--chat-template": None if "{" in (config.chat_template or "") else config.chat_template,
    }
    for flag, path in files.items():
        if path is None:
            continue
        try:
            with open(path, "rb"):
                pass
        except OSError as error:
            raise ConfigError(
                f"cannot read {flag} {path}: {error.strerror}; expected a file"
            ) from None
