"""Options by the names of their flags, for builders that get a mapping instead of a command line.

`serve run` passes every value as a text, a configuration of Ray Serve passes numbers and booleans.
"""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import Field, fields, replace
from types import UnionType
from typing import Any, Union, get_args, get_origin

from quire.config.kv_config import KVConfig
from quire.errors import ConfigError, UnknownName
from quire.layout.options import OptionInfo, config_of
from quire.scale.config import RayConfig
from quire.scale.recipe import EngineRecipe
from quire.scale.routing.policies import RouterConfig
from quire.scale.serve.recipe import ServeRecipe
from quire.scheduler.schedule_config import ScheduleConfig
from quire.serve.config import ServerConfig
from quire.serve.tenant_keys import TenantKeys, open_tenants
from quire.tenancy.tenants import parse_tenants

_NO_SOCKET = ("host", "port", "ssl-certfile", "ssl-keyfile", "ssl-ca-certs")


def recipe_of(args: Mapping[str, Any]) -> ServeRecipe:
    """The recipe of some options; further API keys come from the environment.

    Raises:
        ConfigError: a missing model, a wrong value, or an option of sockets, which Ray has.
        UnknownName: an unknown option.
    """
    given = {name.replace("_", "-"): value for name, value in args.items()}
    for name in _NO_SOCKET:
        if name in given:
            raise ConfigError(
                f"{name} is set in the HTTP options of Ray Serve: leave it out here, or use "
                "quire serve MODEL --ray"
            )
    _refuse_unknown(given)
    if not isinstance(given.get("model"), str):
        raise ConfigError("expected model=NAME, such as model=quire-tiny, got none")
    configs = {"kv": _config(KVConfig, given), "schedule": _config(ScheduleConfig, given)}
    own = {
        name.replace("-", "_"): _value(name, given[name], kind)
        for name, kind in _llm_options().items()
        if name in given
    }
    engine = EngineRecipe(
        model=given["model"],
        options=own | configs,
        threads=_value("threads", given.get("threads", 0), int),
    )
    # clients of other machines: Ray's proxies determine the address
    server = replace(_config(ServerConfig, given), host="0.0.0.0")
    ray, routing = _config(RayConfig, given | {"ray": True}), _config(RouterConfig, given)
    return recipe_with_keys(engine, server, ray, routing)


def recipe_with_keys(
    engine: EngineRecipe, server: ServerConfig, ray: RayConfig, routing: RouterConfig
) -> ServeRecipe:
    """A recipe with digests of the API keys of options, file and environment."""
    specs = parse_tenants(engine.options["schedule"].tenants)
    tenants = open_tenants(server, specs)
    keys = TenantKeys(tenants.keys, specs)
    metrics_key = server.key_of_metrics()
    if engine.threads == 0 and ray.cpus:
        engine = replace(engine, threads=max(1, int(ray.cpus)))
    return ServeRecipe(
        engine=engine,
        # the keys themselves are not sent to other processes, except that of the metrics
        server=replace(server, api_key=(), tenant_keys=None, metrics_key=metrics_key),
        ray=ray,
        routing=routing,
        keys=keys,
        tenants=replace(tenants, keys={}),
    )


_CONFIGS = (KVConfig, ScheduleConfig, ServerConfig, RayConfig, RouterConfig)


def _refuse_unknown(given: Mapping[str, Any]) -> None:
    known = {flag for config in _CONFIGS for flag, _ in _flags(config)}
    known |= {"model", "threads", *_llm_options()}
    for name in given:
        if name not in known:
            raise UnknownName("option", name, known - set(_NO_SOCKET))


def _llm_options() -> Mapping[str, Any]:
    """Flags of the keyword arguments of `LLM` that are no configs, with their annotations."""
    from quire.api.llm import LLM  # imports torch

    parameters = inspect.signature(LLM).parameters.values()
    return {
        parameter.name.replace("_", "-"): parameter.annotation
        for parameter in parameters
        if parameter.name not in ("model", "kv", "schedule")
    }


def _flags(config: Any) -> Iterator[tuple[str, Any]]:
    for field in fields(config):
        held = config_of(field.type)
        if held is not None:
            yield from _flags(held)
        else:
            yield _flag(field), field.type


def _flag(field: Field[Any]) -> str:
    info: OptionInfo = field.metadata.get("option", OptionInfo())
    return info.flag or field.name.replace("_", "-")


def _config(config: Any, given: Mapping[str, Any]) -> Any:
    values: dict[str, Any] = {}
    for field in fields(config):
        held, flag = config_of(field.type), _flag(field)
        if held is not None:
            values[field.name] = _config(held, given)
        elif flag in given:
            values[field.name] = _value(flag, given[flag], field.type)
    return config(**values)


def _value(flag: str, value: Any, kind: Any) -> Any:
    """A value for a field; a text is converted to the field's type."""
    if not isinstance(value, str):
        return value
    members = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    if get_origin(kind) is tuple:
        return [text for text in value.split(",") if text]
    if str in members or not {bool, int, float} & set(members):
        return value  # a text, a choice, or a size, which the config parses
    for member, parse in ((bool, _bool), (int, int), (float, float)):
        if member in members:
            try:
                return parse(value)
            except ValueError:
                raise ConfigError(f"expected {flag} as {member.__name__}, got {value!r}") from None
    return value


def _bool(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"
