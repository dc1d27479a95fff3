"""What a command was told, resolved: the command line over the TOML file over the defaults."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quire.cli.command import Command
from quire.cli.common import ABOUT_MODEL, PACKAGED_MODEL, refuse_no_name, use_threads
from quire.cli.config_file import read_config_file
from quire.cli.options import (
    KV,
    MACHINE,
    MODEL,
    SAMPLING,
    SCHEDULE,
    SECTIONS,
    SERVER,
    TRACE,
    ModelConfig,
    OptionField,
    Section,
    options_of,
)
from quire.config.kv_config import KVConfig
from quire.config.sampling_params import SamplingParams
from quire.errors import ConfigError
from quire.layout.options import option_values
from quire.scheduler.schedule_config import ScheduleConfig
from quire.serve.config import ServerConfig
from quire.sim.machine import MachineConfig
from quire.sim.traces.base import TraceOptions

if TYPE_CHECKING:
    from quire.api.llm import LLM

VERBOSE_KEY = "quire.cli.verbose"
"""Where the command line's context keeps whether tracebacks are wanted."""

PREFIX_CACHE = "kv_prefix_cache_enabled"
"""The parameter of --enable-prefix-caching."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything a command needs to make an LLM, and how it samples.

    Attributes:
        model: "quire-tiny", a folder or a hub name.
        loading: how it is loaded.
        kv: its KV memory.
        schedule: its steps and queues.
        sampling: of every request that says nothing else.
        trace, machine: what a simulation runs, and on what.
        server: its HTTP server.
        given: parameters that the command line or the file gave, not the defaults.
        verbose: say more on standard error.
    """

    model: str = PACKAGED_MODEL
    loading: ModelConfig = field(default_factory=ModelConfig)
    kv: KVConfig = field(default_factory=KVConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    trace: TraceOptions = field(default_factory=TraceOptions)
    machine: MachineConfig = field(default_factory=MachineConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    verbose: bool = False
    given: frozenset[str] = frozenset()

    def as_dict(self) -> dict[str, object]:
        """All options of an engine as JSON values, for the config of a result."""
        return {
            "model": self.model,
            "loading": option_values(self.loading),
            "kv": option_values(self.kv),
            "schedule": option_values(self.schedule),
            "sampling": asdict(self.sampling),
        }

    def open_llm(self) -> "LLM":
        """Load the model and take its KV memory.

        Raises:
            ConfigError: options that cannot be.
            ModelError: a model that cannot be read.
        """
        from quire.api.llm import LLM  # torch and transformers: never for --help

        self.set_threads()
        llm = LLM(
            self.model,
            dtype=self.loading.dtype,
            device=self.loading.device,
            kv=self.kv,
            schedule=self.schedule,
            trust_remote_code=self.loading.trust_remote_code,
            verify=self.loading.verify,
            return_memory=self.loading.return_memory,
            weights_memory=self.loading.weights_memory,
        )
        why_no_prefix = llm.engine.pool.why_no_prefix
        if why_no_prefix and self.kv.prefix_cache.enabled and PREFIX_CACHE in self.given:
            raise ConfigError(
                f"--enable-prefix-caching has no effect: {why_no_prefix}; leave out "
                "--enable-prefix-caching, or use "
                "another store or policy"
            )
        place = llm.model.place
        if place is not None and (self.verbose or not place.offloaded_layers):
            typer.echo(place.text, err=True)
        if self.verbose:
            typer.echo(llm.engine.pool.explanation, err=True)
        return llm

    def refuse_other_tenants(self) -> None:
        """Refuse tenants where every request is the default tenant's, before a model is loaded.

        Raises:
            ConfigError: `schedule.tenants` names others only.
        """
        from quire.config.generation_request import DEFAULT_TENANT
        from quire.tenancy.tenants import parse_tenants

        names = [spec.name for spec in parse_tenants(self.schedule.tenants)]
        if names and DEFAULT_TENANT not in names:
            raise ConfigError(
                f"requests of this command are tenant {DEFAULT_TENANT!r}'s, --tenants names "
                f"{', '.join(names)}: name {DEFAULT_TENANT!r} too, or leave --tenants out"
            )

    def set_threads(self) -> None:
        """Give torch as many threads as was said.

        Raises:
            ConfigError: a negative number, or many more than this machine has CPUs.
        """
        use_threads(self.loading.threads)


def with_settings(
    *sections: Section,
    defaults: Mapping[str, object] | None = None,
    model_default: str = PACKAGED_MODEL,
    model_required: bool = False,
    about_model: str = ABOUT_MODEL,
) -> Callable[[Command], Command]:
    """Give a command MODEL as its first argument, and the options of some sections.

    The command declares a parameter `settings: Settings` and its own options after it.

    Args:
        sections: whose options it takes; all of them by default.
        defaults: flag to this command's own default.
        model_default: the model where neither the command line nor the file names one.
        model_required: whether the command line must name a model.
        about_model: help of the model.
    """
    options = options_of(sections or (MODEL, KV, SCHEDULE, SAMPLING), defaults)

    def decorate(command: Command) -> Command:
        own = [
            parameter
            for name, parameter in inspect.signature(command).parameters.items()
            if name != "settings"
        ]

        def run(ctx: Any, **given: Any) -> None:
            ctx.meta[VERBOSE_KEY] = given["verbose"] or ctx.meta.get(VERBOSE_KEY, False)
            settings = _resolve(ctx, given, options, model_default)
            command(settings=settings, **{p.name: given[p.name] for p in own})

        parameters = [
            _keyword("ctx", typer.Context, inspect.Parameter.empty),
            _model_parameter(about_model, None if model_required else model_default),
            *(p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own),
            *map(_parameter, options),
            *_shared_parameters(),
        ]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        return run

    return decorate


def _model_parameter(about: str, default: str | None) -> inspect.Parameter:
    if default is None:
        shown = typer.Argument(metavar="MODEL", help=about)
        return _keyword("model", Annotated[str, shown], inspect.Parameter.empty)
    shown = typer.Argument(metavar="MODEL", help=f"{about} Default: {default}.", show_default=False)
    return _keyword("model", Annotated[str | None, shown], None)


def _shared_parameters() -> Iterator[inspect.Parameter]:
    config = typer.Option("--config", metavar="FILE.toml", help="Options from a file; flags win.")
    verbose = typer.Option("--verbose", "-v", help="Say more; show tracebacks.")
    yield _keyword("config", Annotated[Path | None, config], None)
    yield _keyword("verbose", Annotated[bool, verbose], False)


def _keyword(name: str, annotation: Any, default: object) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default
    )


def _parameter(found: OptionField) -> inspect.Parameter:
    declaration = f"--{found.flag}"
    if found.kind is bool and found.default:
        declaration += f"/--no-{found.flag}"
    default = list(found.default) if isinstance(found.default, tuple) else found.default
    shown = typer.Option(
        declaration,
        help=_sentence(found),
        metavar=found.metavar,
        show_default=default is not None and default != [],
        rich_help_panel=found.group,
        hidden=not found.common,
    )
    kind: Any = found.kind if default is not None else found.kind | None
    return _keyword(found.parameter, Annotated[kind, shown], default)


def _sentence(found: OptionField) -> str:
    text = found.help[:1].upper() + found.help[1:].rstrip(".") + "."
    return text + " May be given several times." if found.kind == list[str] else text


def _resolve(
    ctx: Any, given: Mapping[str, Any], options: tuple[OptionField, ...], model_default: str
) -> Settings:
    file_model: str | None = None
    values: dict[str, object] = {}
    if given["config"] is not None:
        file_model, values = read_config_file(given["config"])
    named = given["model"] if given["model"] is not None else file_model
    refuse_no_name(named)
    parts: dict[str, dict[tuple[str, ...], Any]] = {section.name: {} for section in SECTIONS}
    typed = frozenset(found.parameter for found in options if _is_said(ctx, found.parameter))
    for found in options:
        from_file = found.parameter in values and found.parameter not in typed
        value = values[found.parameter] if from_file else given[found.parameter]
        parts[found.section][found.path] = value
    return Settings(
        model=model_default if named is None else named,
        loading=MODEL.build(parts[MODEL.name]),
        kv=KV.build(parts[KV.name]),
        schedule=SCHEDULE.build(parts[SCHEDULE.name]),
        sampling=SAMPLING.build(parts[SAMPLING.name]),
        trace=TRACE.build(parts[TRACE.name]),
        machine=MACHINE.build(parts[MACHINE.name]),
        server=SERVER.build(parts[SERVER.name]),
        verbose=given["verbose"],
        given=typed.union(values),
    )


def _is_said(ctx: Any, parameter: str) -> bool:
    source = ctx.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"
