"""Options made from the fields of the config dataclasses: one place for a default and a sentence.

A section is a dataclass whose fields become options. What `--help` shows of a field is in its
metadata (`quire.layout.options.option`); SamplingParams has the sentences in its docstring. Flags
and the TOML file share the names.
"""

import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, Literal, Union, get_args, get_origin, no_type_check

from quire.config.kv_config import KVConfig
from quire.config.sampling_params import SamplingParams
from quire.errors import ConfigError
from quire.layout.options import (
    MaybeSize,
    OptionInfo,
    Parsed,
    check_options,
    choices_of,
    config_of,
    option,
)
from quire.layout.sizes import parse_size_or
from quire.scheduler.schedule_config import ScheduleConfig
from quire.serve.config import ServerConfig
from quire.sim.machine import MachineConfig
from quire.sim.traces.base import TraceOptions

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")


@no_type_check  # run-time type checks in tests must not answer before our own refusals
@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """How a model is loaded.

    Attributes are options; see their help.

    Raises:
        ConfigError: a value of the wrong type, or none of the choices.
    """

    dtype: Dtype = option(
        "auto", help="number format of the weights; auto: as they are stored", common=True
    )
    device: str = option(
        "auto", help="auto (CUDA where there is one), cpu, cuda or cuda:N", common=True
    )
    trust_remote_code: bool = option(False, help="run Python code that the model folder brings")
    verify: bool = option(True, help="compare with Transformers' own attention at load")
    weights_memory: MaybeSize = option(
        "all",
        help="device memory for weights: bytes, a size, or all; layers beyond it stay in CPU "
        "memory (with a CPU device: in a file) and are prefetched in every step",
        unit="bytes",
        group="Offloading",
        parse=parse_size_or("all"),
        common=True,
    )
    threads: int = option(
        0,
        help="CPU threads, 0: as many as torch takes; a small model on a busy machine wants 1",
    )
    return_memory: bool = option(
        False,
        help="give freed CPU memory back to the system, which makes prompts slower on a CPU",
    )

    def __post_init__(self) -> None:
        check_options(self)
        if not _DEVICE.fullmatch(self.device):
            raise ConfigError(
                f"expected device to be auto, cpu, cuda or cuda:N, got {self.device!r}"
            )


@dataclass(frozen=True, slots=True)
class OptionField:
    """One option of the command line and of the TOML file.

    Attributes:
        section: name of the section it belongs to.
        path: names of the field and of the configs that hold it, such as offload, kv_memory.
        flag: name on the command line, without the leading dashes.
        kind: what the command line reads: str, int, float, bool or list[str].
        sized: a whole number of bytes is as good as text.
        choices: allowed values; empty where they are not listed.
        default: of the field or of the command.
        help: one sentence.
        group: its heading in `--help`.
        common: whether `--help` shows it.
    """

    section: str
    path: tuple[str, ...]
    flag: str
    kind: type | types.GenericAlias
    sized: bool
    choices: tuple[str, ...]
    default: Any
    help: str
    group: str
    common: bool

    @property
    def name(self) -> str:
        """Name of the field."""
        return self.path[-1]

    @property
    def parameter(self) -> str:
        """A Python name that is unique over all sections."""
        return "_".join((self.section, *self.path))

    @property
    def metavar(self) -> str | None:
        """What stands for its value in `--help`; None: the name of the type."""
        if self.choices:
            return f"[{'|'.join(self.choices)}]"
        return "SIZE" if self.sized else None


@dataclass(frozen=True, slots=True)
class Section:
    """A config dataclass whose fields are options.

    Attributes:
        name: of the table in a TOML file.
        title: above its options in `--help`.
        config: the dataclass.
        only: flags of the fields that become options; None for all.
        shown: whether `--help` shows its common options; otherwise `--help-all` does.
    """

    name: str
    title: str
    config: type
    only: tuple[str, ...] | None = None
    shown: bool = True

    def options(self) -> Iterator[OptionField]:
        """Its options in the order of the fields."""
        yield from _option_fields(self, self.config, (), self.title)

    def build(self, values: Mapping[tuple[str, ...], object]) -> Any:
        """The config, made of the values of its options by their paths."""
        return _build(self.config, values)


def options_of(
    sections: tuple[Section, ...], defaults: Mapping[str, object] | None = None
) -> tuple[OptionField, ...]:
    """All options of some sections.

    Args:
        sections: in the order of `--help`.
        defaults: flag to the default of this command, where it differs from the field's.
    """
    defaults = defaults or {}
    return tuple(
        replace(found, default=defaults.get(found.flag, found.default))
        for section in sections
        for found in section.options()
    )


def documented_attributes(docstring: str) -> dict[str, str]:
    """The `Attributes:` of a Google docstring: name to its text on one line."""
    _, _, listed = docstring.partition("Attributes:\n")
    listed = re.split(r"\n\s*\n", listed, maxsplit=1)[0]
    found: dict[str, str] = {}
    name = ""
    for line in listed.splitlines():
        head = re.fullmatch(r" {8}(\w+): (.*)", line)
        if head:
            name = head[1]
            found[name] = head[2]
        elif name:
            found[name] += " " + line.strip()
    return found


def configs_of(section: Section) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The config of a section and those that it holds, each under the path of its table."""
    yield (section.name,), section.config
    for field in fields(section.config):
        held = config_of(field.type)
        if held is not None:
            yield (section.name, field.name), held


def _option_fields(
    section: Section, config: Any, path: tuple[str, ...], group: str
) -> Iterator[OptionField]:
    """Options of a config and of the configs that it holds."""
    documented = documented_attributes(config.__doc__ or "")
    for field in fields(config):
        info = field.metadata.get("option", OptionInfo())
        where, heading = (*path, field.name), info.group or group
        held = config_of(field.type)
        if held is not None:
            yield from _option_fields(section, held, where, heading)
            continue
        flag = info.flag or field.name.replace("_", "-")
        if section.only is not None and flag not in section.only:
            continue
        assert field.default is not MISSING, f"{section.name}.{field.name} has no default"
        kind, sized = _kind(field.type)
        yield OptionField(
            section=section.name,
            path=where,
            flag=flag,
            kind=kind,
            sized=sized,
            choices=choices_of(field.type),
            default=field.default,
            help=info.help or documented.get(field.name, ""),
            group=heading,
            common=info.common and section.shown,
        )


def _build(config: Any, values: Mapping[tuple[str, ...], object]) -> Any:
    made: dict[str, object] = {path[0]: value for path, value in values.items() if len(path) == 1}
    for field in fields(config):
        held = config_of(field.type)
        if held is not None:
            inner = {path[1:]: v for path, v in values.items() if path[0] == field.name}
            made[field.name] = _build(held, inner)
    return config(**made)


def _kind(annotation: Any) -> tuple[type | types.GenericAlias, bool]:
    """What the command line reads for a field, and whether it is a size in bytes."""
    if get_origin(annotation) in (Union, types.UnionType):
        (annotation,) = [member for member in get_args(annotation) if member is not type(None)]
    if get_origin(annotation) is Parsed:
        given, _held = get_args(annotation)
        return str, int in get_args(given)
    if choices_of(annotation):
        return str, False
    if get_origin(annotation) is tuple:
        return types.GenericAlias(list, (str,)), False
    assert annotation in (str, int, float, bool), f"no option can be made from {annotation}"
    return annotation, False


MODEL = Section("model", "Model", ModelConfig)
KV = Section("kv", "KV memory", KVConfig)
SCHEDULE = Section("schedule", "Scheduling", ScheduleConfig)
SIMULATED_KV = Section(
    "kv",
    "KV memory",
    KVConfig,
    (
        *("kv-memory", "swap-space", "kv-store", "kv-store-tokens", "block-size", "kv-codec"),
        *("evict", "enable-prefix-caching"),
    ),
)
"""What a simulation reads of the KV memory: it has no bytes, links or kernels."""
SIMULATED_SCHEDULE = Section(
    "schedule",
    "Scheduling",
    ScheduleConfig,
    tuple(found.flag for found in SCHEDULE.options() if found.flag != "objective"),
)
SAMPLING = Section(
    "sampling",
    "Sampling",
    SamplingParams,
    (
        *("max-tokens", "min-tokens", "temperature", "top-k", "top-p", "min-p", "seed", "stop"),
        *("ignore-eos", "repetition-penalty", "presence-penalty", "frequency-penalty"),
        *("n", "best-of", "use-beam-search", "beam-width", "length-penalty"),
    ),
)
TRACE = Section("trace", "Trace", TraceOptions)
MACHINE = Section("machine", "Machine", MachineConfig)
SERVER = Section("server", "Server", ServerConfig)
SECTIONS = (MODEL, KV, SCHEDULE, SAMPLING, TRACE, MACHINE, SERVER)
