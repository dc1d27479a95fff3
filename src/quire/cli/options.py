"""Command line options, generated from the fields of the config dataclasses.

A section is a dataclass whose fields become options. The help text of a field is in its metadata
(`quire.layout.options.option`); for SamplingParams it is in the docstring. Flags and the TOML file
use the same names.

The TOML file of `--config`: options by the names of their flags, flat or in tables.

model = "quire-tiny"
kv-memory = "64MiB"        # flat: the name of the flag

[kv]
codec = "none"             # in a table: the name of the flag or of the field

[kv.offload]
kv_memory = "1GiB"         # in a nested table: the same

A table [model] contains the model as `name`, because TOML refuses duplicate keys.
"""

import inspect
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, no_type_check

import typer

from quire.cli.completion import completer_of
from quire.config.chat_messages import ContentFormat
from quire.config.kv_config import KVConfig
from quire.config.sampling_params import SamplingParams
from quire.errors import ConfigError, UnknownName
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
from quire.layout.values import read_toml
from quire.parallel.lockstep import DEFAULT_TIMEOUT_S
from quire.scale.config import ClusterConfig, RayConfig
from quire.scale.routing.policies import RouterConfig
from quire.scheduler.schedule_config import ScheduleConfig
from quire.serve.config import ServerConfig
from quire.sim.machine import MachineConfig
from quire.sim.traces.base import TraceOptions

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
WeightCodec = Literal["auto", "int8", "int4"]
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")


@no_type_check  # run-time type checks in tests must not precede ConfigError
@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Options of model loading."""

    dtype: Dtype = option(
        "auto", help="dtype of the weights; auto: as stored in the checkpoint", common=True
    )
    device: str = option(
        "auto", help="device: cpu, cuda, cuda:N, or auto (CUDA if available, else CPU)", common=True
    )
    trust_remote_code: bool = option(False, help="allow Python code from the model folder")
    verify: bool = option(
        True, help="compare logits with Transformers' attention when the model is loaded"
    )
    model_impl: Literal["auto", "native", "transformers"] = option(
        "auto",
        help="native: fused layers (Llama, Mistral, Qwen2, Qwen3, Phi-3), on a GPU in Triton; "
        "transformers: the layers of Transformers; auto: native if supported",
    )
    weight_codec: WeightCodec = option(
        "auto", help="quantize linear layers at load: int8 or int4; auto: as stored"
    )
    chat_template_content_format: ContentFormat = option(
        "auto",
        help="content of messages that the chat template gets: string, openai (a list of parts), "
        "or auto (what the template reads)",
    )
    max_model_len: int | None = option(
        None,
        help="maximum tokens of a sequence, prompt and output; unset: the model's context",
        unit="tokens",
    )
    weights_memory: MaybeSize = option(
        "all",
        help="device memory for weights: bytes, a size, or all; further layers are offloaded to "
        "CPU memory (with a CPU device: to a file) and prefetched in every step",
        unit="bytes",
        group="Offloading",
        parse=parse_size_or("all"),
        common=True,
    )
    tensor_parallel_size: int = option(
        1,
        help="processes (ranks) that divide the heads of the model, one for each CUDA device; "
        "--kv-memory is the memory of each rank",
        synonyms=("tensor-parallel", "tp"),
    )
    tensor_parallel_timeout: float = option(
        DEFAULT_TIMEOUT_S,
        help="maximum time in seconds that a rank waits for the others in a step; then the "
        "engine ends",
        unit="s",
    )
    threads: int = option(
        0,
        help="CPU threads; 0: PyTorch's default. A small model is fastest with 1 on a busy machine",
        common=True,
    )
    return_memory: bool = option(
        False,
        help="return freed CPU memory to the system; slower prefill on a CPU",
    )

    def __post_init__(self) -> None:
        check_options(self)
        if not _DEVICE.fullmatch(self.device):
            raise ConfigError(
                f"expected device to be auto, cpu, cuda or cuda:N, got {self.device!r}"
            )


@dataclass(frozen=True, slots=True)
class OptionField:
    """One option of the command line and of the TOML file."""

    section: str
    # names of the enclosing configs and of the field, such as offload, kv_memory
    path: tuple[str, ...]
    flag: str  # without the leading dashes
    kind: type | types.GenericAlias  # str, int, float, bool or list[str]
    sized: bool  # whether the value may be an integer number of bytes
    choices: tuple[str, ...]
    default: Any  # of the command, else of the field
    help: str
    group: str  # heading in `--help`
    common: bool  # in `--help`; others in `--help-all` only
    synonyms: tuple[str, ...] = ()  # further names, without the leading dashes
    placeholder: str = ""  # of the value; empty: the choices, or the type
    min_value: int | float | None = None
    max_value: int | float | None = None

    @property
    def name(self) -> str:
        return self.path[-1]

    @property
    def parameter(self) -> str:
        """A Python name that is unique among all sections."""
        return "_".join((*filter(None, (self.section,)), *self.path))

    @property
    def metavar(self) -> str | None:
        if self.choices:
            return f"[{'|'.join(self.choices)}]"
        return "SIZE" if self.sized else self.placeholder or None


@dataclass(frozen=True, slots=True)
class Section:
    """A config dataclass whose fields are options."""

    name: str  # table in a TOML file
    title: str  # heading in `--help`
    config: type
    only: tuple[str, ...] | None = None  # flags of the fields that become options; None: all
    shown: bool = True  # whether `--help` shows the common options
    in_file: bool = True
    help: Mapping[str, str] | None = None  # texts that replace the help of fields, by name

    def options(self) -> Iterator[OptionField]:
        yield from _option_fields(self, self.config, (), self.title)

    def without(self, *flags: str) -> "Section":
        kept = tuple(found.flag for found in self.options() if found.flag not in flags)
        return replace(self, only=kept)

    def build(self, values: Mapping[tuple[str, ...], object]) -> Any:
        return _build(self.config, values)


def options_of(
    sections: tuple[Section, ...], defaults: Mapping[str, object] | None = None
) -> tuple[OptionField, ...]:
    """All options of several sections."""
    defaults = defaults or {}
    return tuple(
        replace(found, default=defaults.get(found.flag, found.default))
        for section in sections
        for found in section.options()
    )


def documented_attributes(docstring: str) -> dict[str, str]:
    """Parse the `Attributes:` of a Google-style docstring: name to its text on one line."""
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
    """Yield the config of a section and its nested configs, each with the path of its table."""
    yield (section.name,), section.config
    for field in fields(section.config):
        held = config_of(field.type)
        if held is not None:
            yield (section.name, field.name), held


def _option_fields(
    section: Section, config: Any, path: tuple[str, ...], group: str
) -> Iterator[OptionField]:
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
        kind, sized = _kind(field.type)
        yield OptionField(
            section=section.name,
            path=where,
            flag=flag,
            kind=kind,
            sized=sized,
            choices=choices_of(field.type),
            default=field.default,
            help=(section.help or {}).get(field.name)
            or info.help
            or documented.get(field.name, ""),
            group=heading,
            common=info.common and section.shown,
            synonyms=info.synonyms,
            placeholder=info.metavar,
            min_value=info.min_value,
            max_value=info.max_value,
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
    """Type of a field on the command line, and whether it is a size in bytes."""
    if get_origin(annotation) in (Union, types.UnionType):
        (annotation,) = [member for member in get_args(annotation) if member is not type(None)]
    if get_origin(annotation) is Parsed:
        given, _held = get_args(annotation)
        return str, int in get_args(given)
    if choices_of(annotation):
        return str, False
    if get_origin(annotation) is tuple:
        return types.GenericAlias(list, (str,)), False
    assert annotation in (str, int, float, bool, Path), f"cannot create an option from {annotation}"
    return annotation, False


_FLAGS: dict[str, Section] = {}


def section_of(flags: type, *, in_file: bool) -> Section:
    """The options that belong to one command, declared as a dataclass `NameOfCommandFlags`.

    In a TOML file, the command is the table: [batch] of `BatchFlags`, [eval_run] of `EvalRunFlags`.
    """
    name = re.sub(r"(?<!^)([A-Z])", r"_\1", flags.__name__.removesuffix("Flags")).lower()
    return _FLAGS.setdefault(name, Section(name, "", flags, in_file=in_file))


def command_sections() -> tuple[Section, ...]:
    """Options of the commands that are imported, beside `SECTIONS`, in the order of their names."""
    return tuple(section for _, section in sorted(_FLAGS.items()))


MODEL = Section("model", "Model", ModelConfig)
KV = Section("kv", "KV memory", KVConfig)
SCHEDULE = Section("schedule", "Scheduling", ScheduleConfig)
SIMULATED_KV = Section(
    "kv",
    "KV memory",
    KVConfig,
    (
        *("kv-memory", "swap-space", "block-size", "kv-codec", "evict", "policy-file"),
        "enable-prefix-caching",
    ),
    help={
        "memory": "size of the KV memory: bytes, a size such as 64MiB, or auto (all requests of "
        "the trace fit at once)"
    },
)
"""Options of the KV memory for a simulation, which has no data, transfers or kernels."""
SIMULATED_SCHEDULE = SCHEDULE.without("objective")
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
CLUSTER = Section("cluster", "Cluster", ClusterConfig)
ROUTER = Section("router", "Routing", RouterConfig)
SERVER = Section("server", "Server", ServerConfig)
RAY = Section("ray", "Replicas on Ray", RayConfig)
RAY_BATCH = Section(
    "ray",
    "Replicas on Ray",
    RayConfig,
    ("ray", "ray-replicas", "ray-address", "ray-cpus", "ray-gpus", "ray-object-store-memory"),
)
"""Options of Ray for a batch, which has no router."""
SECTIONS = (MODEL, KV, SCHEDULE, SAMPLING, TRACE, MACHINE, CLUSTER, ROUTER, SERVER, RAY)


def keyword(name: str, annotation: Any, default: object) -> inspect.Parameter:
    """A keyword parameter of a command."""
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default
    )


def option_parameter(
    found: OptionField, callback: Callable[..., Any] | None = None
) -> inspect.Parameter:
    """The parameter of an option; `callback` gets its value before other options are read."""
    declaration = f"--{found.flag}"
    if found.kind is bool and found.default is not False:
        declaration += f"/--no-{found.flag}"
    required = found.default is MISSING
    default = list(found.default) if isinstance(found.default, tuple) else found.default
    shown = typer.Option(
        declaration,
        *(f"-{name}" if len(name) <= 2 else f"--{name}" for name in found.synonyms),
        help=_sentence(found),
        metavar=found.metavar,
        min=found.min_value,
        max=found.max_value,
        show_default=not required and default not in (None, [], ""),
        rich_help_panel=found.group or None,
        hidden=not found.common,
        autocompletion=completer_of(found.flag, found.choices),
        callback=callback,
        is_eager=callback is not None,
    )
    kind: Any = found.kind | None if default is None else found.kind
    return keyword(
        found.parameter, Annotated[kind, shown], inspect.Parameter.empty if required else default
    )


def _sentence(found: OptionField) -> str:
    text = found.help[:1].upper() + found.help[1:].rstrip(".") + "."
    return text + " Can be repeated." if found.kind == list[str] else text


MODEL_KEY = "model"
_NAME_KEY = "name"


def read_config_file(path: Path) -> tuple[str | None, dict[str, object]]:
    """The model of a file of options, or None, and its values by `OptionField.parameter`."""
    content = read_toml(path, "config file")
    model: str | None = None
    values: dict[str, object] = {}
    sections = (*SECTIONS, *(section for section in command_sections() if section.in_file))
    tables = {
        section.name: tuple(found for found in section.options() if found.path != ("config",))
        for section in sections
    }
    for key, value in content.items():
        if key == MODEL_KEY and not isinstance(value, Mapping):
            model = _model_name(path, MODEL_KEY, value)
        elif key in tables and isinstance(value, Mapping):
            inner = dict(value)
            if key == MODEL_KEY and _NAME_KEY in inner:
                model = _model_name(path, "model.name", inner.pop(_NAME_KEY))
            _read_table(values, path, tables[key], (key,), inner)
        else:
            _put(values, path, _find_flat(key, path), value)
    return model, values


def _read_table(
    values: dict[str, object],
    path: Path,
    options: Sequence[OptionField],
    names: tuple[str, ...],
    table: Mapping[str, object],
) -> None:
    """Read a table and its sub-tables: [kv.offload] has the fields of `KVConfig.offload`."""
    inside = [found for found in options if found.path[: len(names) - 1] == names[1:]]
    inner_tables = {found.path[len(names) - 1] for found in inside if len(found.path) > len(names)}
    for name, value in table.items():
        if _underscored(name) in inner_tables and isinstance(value, Mapping):
            _read_table(values, path, options, (*names, _underscored(name)), value)
        else:
            known = {_underscored(found.flag): found for found in inside}
            known |= {found.name: found for found in inside if len(found.path) == len(names)}
            kind = f"option of [{'.'.join(names)}] in {path}"
            if _underscored(name) not in known:
                raise UnknownName(kind, name, {*known, *inner_tables})
            _put(values, path, known[_underscored(name)], value)


def _model_name(path: Path, key: str, value: object) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{path}: {key!r} must be a string, got {value!r}")
    return value


def _find_flat(name: str, path: Path) -> OptionField:
    known = {_underscored(found.flag): found for found in options_of(SECTIONS)}
    if _underscored(name) not in known:
        tables = [section.name for section in SECTIONS]
        raise UnknownName(f"option in {path}", name, [*known, *tables])
    return known[_underscored(name)]


def _underscored(name: str) -> str:
    return name.replace("-", "_")


def _put(values: dict[str, object], path: Path, found: OptionField, value: object) -> None:
    if found.parameter in values:
        raise ConfigError(f"{path} sets {found.flag!r} twice; leave one out")
    values[found.parameter] = _checked(path, found, value)


_EXPECTED: Mapping[object, str] = {
    str: "a string",
    Path: "a string",
    int: "an integer",
    float: "a number",
    bool: "true or false",
}


def _checked(path: Path, found: OptionField, value: object) -> object:
    expected = _EXPECTED.get(found.kind, "a string or a list of strings")
    if found.sized:
        expected = "a number of bytes or a size such as '64MiB'"
    if not _fits(found, value):
        raise ConfigError(f"{path}: {found.flag!r} must be {expected}, got {value!r}")
    if found.kind is Path:
        return Path(str(value))
    # convert to text, as a flag is, so that a small number without a unit is refused
    return str(value) if found.sized and value in range(1, 1024) else value


def _fits(found: OptionField, value: object) -> bool:
    if isinstance(value, bool) or found.kind is bool:
        return isinstance(value, bool) and found.kind is bool
    if found.sized:
        return isinstance(value, int | str)
    if found.kind is float:
        return isinstance(value, int | float)
    if found.kind is int:
        return isinstance(value, int)
    if found.kind in (str, Path):
        return isinstance(value, str)
    texts = value if isinstance(value, list) else [value]
    return all(isinstance(text, str) for text in texts)
