"""Resolved options of a command: command line, then TOML file, then defaults."""

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, no_type_check

import typer

from quire.cli.command import Command
from quire.cli.common import ABOUT_MODEL, refuse_no_name, use_threads
from quire.cli.completion import complete_model
from quire.cli.options import (
    CLUSTER,
    KV,
    MACHINE,
    MODEL,
    MODEL_KEY,
    RAY,
    ROUTER,
    SAMPLING,
    SCHEDULE,
    SECTIONS,
    SERVER,
    TRACE,
    ModelConfig,
    OptionField,
    Section,
    keyword,
    option_parameter,
    options_of,
    read_config_file,
    section_of,
)
from quire.cli.report import json_only
from quire.cli.startup import LoadProgress, fast_imports
from quire.config.kv_config import KVConfig
from quire.config.sampling_params import SamplingParams
from quire.errors import ConfigError, RequestError
from quire.layout.options import check_options, option, option_values
from quire.layout.packaged import PACKAGED_MODEL
from quire.scale.config import ClusterConfig, RayConfig
from quire.scale.routing.policies import RouterConfig
from quire.scheduler.schedule_config import ScheduleConfig
from quire.serve.config import ServerConfig
from quire.sim.machine import MachineConfig
from quire.sim.traces.base import TraceOptions

if TYPE_CHECKING:
    from quire.api.llm import LLM

VERBOSE_KEY = "quire.cli.verbose"
"""Key of the `--verbose` flag in the context of the command line."""

"""The parameter of --enable-prefix-caching."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Resolved options of a command."""

    model: str = PACKAGED_MODEL  # "quire-tiny", a folder or a hub name
    file_model: str | None = None  # that of --config, which an argument overrides
    loading: ModelConfig = field(default_factory=ModelConfig)
    kv: KVConfig = field(default_factory=KVConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    sampling: SamplingParams = field(default_factory=SamplingParams)  # defaults of requests
    trace: TraceOptions = field(default_factory=TraceOptions)
    machine: MachineConfig = field(default_factory=MachineConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    ray: RayConfig = field(default_factory=RayConfig)
    verbose: bool = False
    given: frozenset[str] = frozenset()  # parameters set on the command line or in the file

    def as_dict(self) -> dict[str, object]:
        """Options of the engine as JSON values, for the `config` of a result."""
        return {
            "model": self.model,
            "loading": option_values(self.loading),
            "kv": option_values(self.kv),
            "schedule": option_values(self.schedule),
            "sampling": asdict(self.sampling),
        }

    def open_llm(self) -> "LLM":
        loading = LoadProgress(self.model)
        with loading.shown():
            llm = self._load()
        loading.report(llm)
        place = llm.model.place
        if place is not None and (self.verbose or not place.offloaded_layers):
            typer.echo(place.text, err=True)
        if self.verbose:
            typer.echo(llm.engine.pool.explanation, err=True)
        return llm

    def _load(self) -> "LLM":
        with fast_imports():
            from quire.api.llm import LLM  # imports torch and transformers

        self.set_threads()
        return LLM(self.model, **self.llm_options())

    def llm_options(self) -> dict[str, Any]:
        return {
            "dtype": self.loading.dtype,
            "device": self.loading.device,
            "kv": self.kv,
            "schedule": self.schedule,
            "trust_remote_code": self.loading.trust_remote_code,
            "verify": self.loading.verify,
            "chat_template_content_format": self.loading.chat_template_content_format,
            "max_model_len": self.loading.max_model_len,
            "return_memory": self.loading.return_memory,
            "weights_memory": self.loading.weights_memory,
            "model_impl": self.loading.model_impl,
            "weight_codec": self.loading.weight_codec,
            "tensor_parallel_size": self.loading.tensor_parallel_size,
            "tensor_parallel_timeout": self.loading.tensor_parallel_timeout,
        }

    def for_one_request(self) -> "Settings":
        """Batch slots of one request unless set: they bound the automatic size of the KV memory.

        A note says if a file of rules is not used.
        """
        if self.kv.policy_file and self.kv.evict.strip() == "full":
            typer.echo("note: --policy-file has no effect without --evict RULE", err=True)
        if "schedule_max_num_seqs" in self.given:
            return self
        rows = self.sampling.num_sequences
        return replace(self, schedule=replace(self.schedule, max_num_seqs=rows))

    def refuse_other_tenants(self) -> None:
        """Refuse `--tenants` without `default`, to which all requests of this command belong."""
        from quire.config.generation_request import DEFAULT_TENANT
        from quire.tenancy.tenants import parse_tenants

        names = [spec.name for spec in parse_tenants(self.schedule.tenants)]
        if names and DEFAULT_TENANT not in names:
            raise ConfigError(
                f"requests of this command belong to tenant {DEFAULT_TENANT!r}, but --tenants "
                f"names {', '.join(names)}: add {DEFAULT_TENANT!r}, or leave --tenants out"
            )

    def set_threads(self) -> None:
        use_threads(self.loading.threads)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedFlags:
    """Options of every command with `Settings`."""

    config: Path | None = option(
        None,
        help="Read options from a file; flags take precedence.",
        metavar="FILE.toml",
        common=True,
    )
    verbose: bool = option(
        False, help="Print details and tracebacks.", synonyms=("v",), common=True
    )


_SHARED = Section("", "", SharedFlags)


def with_settings(
    *sections: Section,
    defaults: Mapping[str, object] | None = None,
    model_default: str = PACKAGED_MODEL,
    model_required: bool = False,
    about_model: str = ABOUT_MODEL,
) -> Callable[[Command], Command]:
    """Add MODEL as the first argument and the options of several sections to a command.

    The command declares a parameter `settings: Settings`, its own arguments, and its own options as
    a parameter `flags` of a dataclass.
    """
    options = options_of(sections or (MODEL, KV, SCHEDULE, SAMPLING), defaults)

    def decorate(command: Command) -> Command:
        arguments, own = _parameters_of(command, in_file=True)

        def run(ctx: Any, **given: Any) -> None:
            shared: SharedFlags = _SHARED.build(_given(_SHARED, given))
            ctx.meta[VERBOSE_KEY] = shared.verbose or ctx.meta.get(VERBOSE_KEY, False)
            if ctx.meta[VERBOSE_KEY]:  # a request only has the text of an error of its rule
                logging.basicConfig(format="%(message)s")
                logging.getLogger("quire.eviction").setLevel(logging.DEBUG)
            file = (None, {}) if shared.config is None else read_config_file(shared.config)
            settings = _resolve(ctx, given, options, file, model_default)
            _load_policies(settings.kv)
            passed = {argument.name: given[argument.name] for argument in arguments}
            typed = {name for name in given if _is_typed(ctx, name)}
            values = given | {name: value for name, value in file[1].items() if name not in typed}
            flags = _flags(own, values)
            with _json_only(flags):
                command(settings=settings, **passed, **flags)

        parameters = [
            keyword("ctx", typer.Context, inspect.Parameter.empty),
            _model_parameter(about_model, None if model_required else model_default),
            *arguments,
            *_own_parameters(own),
            *map(option_parameter, options),
            *map(option_parameter, _SHARED.options()),
        ]
        return with_parameters(run, command, parameters)

    return decorate


def with_flags(command: Command) -> Command:
    """Add the options of a command that has no `settings`.

    They are the fields of the dataclass of its parameter `flags`; a field `config` is a TOML file,
    of which the values become defaults.
    """
    arguments, own = _parameters_of(command, in_file=False)

    def run(**given: Any) -> None:
        passed = {argument.name: given[argument.name] for argument in arguments}
        flags = _flags(own, given)
        with _json_only(flags):
            command(**passed, **flags)

    return with_parameters(run, command, [*arguments, *_own_parameters(own)])


def _parameters_of(
    command: Command, *, in_file: bool
) -> tuple[list[inspect.Parameter], Section | None]:
    """Arguments of a command, and the section of its own options; None without options."""
    parameters = dict(inspect.signature(command).parameters)
    parameters.pop("settings", None)
    flags = parameters.pop("flags", None)
    arguments = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters.values()]
    if flags is None:
        return arguments, None
    in_file = in_file or any(field.name == "config" for field in fields(flags.annotation))
    return arguments, section_of(flags.annotation, in_file=in_file)


def _own_parameters(own: Section | None) -> Iterator[inspect.Parameter]:
    for found in () if own is None else own.options():
        yield option_parameter(found, _use_file if found.path == ("config",) else None)


def _flags(own: Section | None, given: Mapping[str, Any]) -> dict[str, Any]:
    if own is None:
        return {}
    flags = own.build(_given(own, given))
    check_options(flags)
    _load_policies(flags)
    return {"flags": flags}


def refuse_ignored(flags: Any, *names: str, because: str) -> None:
    """Refuse values of options that have no effect because of another option."""
    given = [own for own in fields(flags) if getattr(flags, own.name) != own.default]
    ignored = ["--" + own.name.replace("_", "-") for own in given if own.name in names]
    if ignored:
        raise ConfigError(f"no effect {because}: {', '.join(ignored)}; leave it out")


def _load_policies(options: Any) -> None:
    """Load the file of --policy-file of a command that has this option."""
    if getattr(options, "policy_file", ""):
        from quire.policies.registry import load_policy_file  # imports torch

        load_policy_file(options.policy_file)


def _json_only(flags: Mapping[str, Any]) -> AbstractContextManager[None]:
    return json_only(enabled=bool(getattr(flags.get("flags"), "as_json", False)))


def _given(section: Section, given: Mapping[str, Any]) -> dict[tuple[str, ...], Any]:
    values = {found.path: given[found.parameter] for found in section.options()}
    return {path: tuple(v) if isinstance(v, list) else v for path, v in values.items()}


def with_parameters(
    run: Command, command: Command, parameters: Sequence[inspect.Parameter]
) -> Command:
    """Give a function the name and help of a command, and parameters that typer reads."""
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run


@no_type_check  # the argument is click's Context; typer.Context is only a marker
def _use_file(ctx: typer.Context, path: Path | None) -> Path | None:
    """Make the values of the file the defaults of the parameters with the same flags."""
    if path is None:
        return None
    model, values = read_config_file(path)
    flags = {f"--{found.flag}": found.parameter for found in options_of(SECTIONS)}
    defaults: dict[str, Any] = {} if model is None else {MODEL_KEY: model}
    for parameter in ctx.command.params:
        for flag in parameter.opts:
            value = values.get(parameter.name, values.get(flags.get(flag, "")))
            if value is not None:
                defaults[parameter.name] = str(value)
    ctx.default_map = defaults
    return path


def config_option() -> Any:
    """The option --config of a command that takes some options of an engine."""
    return option(
        None,
        help="Read options from a file; flags take precedence. Options of other commands are "
        "ignored.",
        metavar="FILE.toml",
        common=True,
    )


def is_from_file(path: Path | None, flag: str, value: object) -> bool:
    """Whether a file contains this value of an option of an engine."""
    if path is None:
        return False
    parameters = {found.flag: found.parameter for found in options_of(SECTIONS)}
    return str(read_config_file(path)[1].get(parameters[flag])) == value


def _model_parameter(about: str, default: str | None) -> inspect.Parameter:
    if default is None:
        shown = typer.Argument(metavar="MODEL", help=about, autocompletion=complete_model)
        return keyword("model", Annotated[str, shown], inspect.Parameter.empty)
    about = f"{about} Default: {default}."
    shown = typer.Argument(
        metavar="MODEL", help=about, show_default=False, autocompletion=complete_model
    )
    return keyword("model", Annotated[str | None, shown], None)


def _resolve(
    ctx: Any,
    given: Mapping[str, Any],
    options: tuple[OptionField, ...],
    file: tuple[str | None, dict[str, object]],
    model_default: str,
) -> Settings:
    file_model, values = file
    named = given["model"] if given["model"] is not None else file_model
    refuse_no_name(named)
    parts: dict[str, dict[tuple[str, ...], Any]] = {section.name: {} for section in SECTIONS}
    typed = frozenset(found.parameter for found in options if _is_typed(ctx, found.parameter))
    for found in options:
        from_file = found.parameter in values and found.parameter not in typed
        value = values[found.parameter] if from_file else given[found.parameter]
        parts[found.section][found.path] = value
    return Settings(
        model=model_default if named is None else named,
        file_model=file_model,
        loading=MODEL.build(parts[MODEL.name]),
        kv=KV.build(parts[KV.name]),
        schedule=SCHEDULE.build(parts[SCHEDULE.name]),
        sampling=_sampling(parts[SAMPLING.name]),
        trace=TRACE.build(parts[TRACE.name]),
        machine=MACHINE.build(parts[MACHINE.name]),
        cluster=CLUSTER.build(parts[CLUSTER.name]),
        router=ROUTER.build(parts[ROUTER.name]),
        server=SERVER.build(parts[SERVER.name]),
        ray=RAY.build(parts[RAY.name]),
        verbose=given["verbose"],
        given=typed.union(values),
    )


def _sampling(parts: dict[tuple[str, ...], Any]) -> SamplingParams:
    """Build the sampling options; an error names the flag and what to do."""
    try:
        built: SamplingParams = SAMPLING.build(parts)
    except RequestError as error:
        if error.param is None:
            raise
        hint = "" if ": " in str(error) else ": change the value, or leave the option out"
        flag = f"--{error.param.replace('_', '-')}"
        raise RequestError(f"{flag}: {error}{hint}", param=error.param) from error
    return built


def _is_typed(ctx: Any, parameter: str) -> bool:
    source = ctx.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"
