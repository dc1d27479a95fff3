"""Options made from the fields of the config dataclasses: one place for a default and a sentence.

A section is a dataclass whose fields became options. KVConfig and ScheduleConfig say the help of a
field in its metadata, SamplingParams in its docstring. Flags and the TOML file share the names.
"""

import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, replace
from typing import Any, Union, get_args, get_origin

from quire.config.kv_config import KVConfig
from quire.config.sampling_params import SamplingParams
from quire.layout.options import OptionInfo, option
from quire.scheduler.schedule_config import ScheduleConfig
from quire.serve.config import ServerConfig
from quire.sim.machine import MachineConfig
from quire.sim.traces.options import TraceOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """How a model is loaded.

    Attributes are options; see their help.
    """

    dtype: str = option("auto", help="weights: auto (as stored), float32, bfloat16 or float16")
    device: str = option("auto", help="auto (CUDA where there is one), cpu or cuda")
    trust_remote_code: bool = option(False, help="run Python code that the model folder brings")
    verify: bool = option(True, help="compare with Transformers' own attention at load")
    weights_memory: int | str = option(
        "all",
        help="memory of the device for weights: bytes, a size, or all; layers beyond it lie on the "
        "host (of a CPU: in a file) and are brought in every step, while others compute",
        unit="bytes",
    )
    threads: int = option(
        0,
        help="CPU threads, 0: as many as torch takes; a small model on a busy machine wants 1",
    )
    return_memory: bool = option(
        False,
        help="give freed host memory back to the system, which makes prompts slower on a CPU",
    )


@dataclass(frozen=True, slots=True)
class OptionField:
    """One option of the command line and of the TOML file.

    Attributes:
        section: name of the section it belongs to.
        name: name of the field.
        flag: name on the command line, without the leading dashes.
        kind: what the command line reads: str, int, float, bool or list[str].
        sized: a whole number of bytes is as good as text.
        default: where nobody says anything.
        help: one sentence.
    """

    section: str
    name: str
    flag: str
    kind: type | types.GenericAlias
    sized: bool
    default: Any
    help: str

    @property
    def parameter(self) -> str:
        """A Python name that is unique over all sections."""
        return f"{self.section}_{self.name}"


@dataclass(frozen=True, slots=True)
class Section:
    """A config dataclass whose fields are options.

    Attributes:
        name: of the table in a TOML file.
        title: above its options in `--help`.
        config: the dataclass.
        only: fields that become options; None for all.
    """

    name: str
    title: str
    config: type
    only: tuple[str, ...] | None = None

    def options(self) -> Iterator[OptionField]:
        """Its options in the order of the fields."""
        documented = documented_attributes(self.config.__doc__ or "")
        declared = fields(self.config)
        for field in declared:
            if self.only is None or field.name in self.only:
                yield _option_field(self.name, field, documented)


MODEL = Section("model", "Model", ModelConfig)
KV = Section("kv", "KV memory", KVConfig)
SCHEDULE = Section("schedule", "Schedule", ScheduleConfig)
SIMULATED_KV = Section(
    "kv",
    "KV memory",
    KVConfig,
    (
        *("memory", "swap_space", "store", "store_tokens", "page_tokens", "codec", "evict"),
        "enable_prefix_caching",
    ),
)
"""What a simulation reads of the KV memory: it has no bytes, links or kernels."""
SIMULATED_SCHEDULE = Section(
    "schedule",
    "Schedule",
    ScheduleConfig,
    tuple(field.name for field in fields(ScheduleConfig) if field.name != "objective"),
)
SAMPLING = Section(
    "sampling",
    "Sampling",
    SamplingParams,
    (
        *("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop"),
        *("ignore_eos", "repetition_penalty", "presence_penalty", "frequency_penalty"),
        *("n", "best_of", "use_beam_search", "beam_width", "length_penalty"),
    ),
)
TRACE = Section("trace", "Trace", TraceOptions)
MACHINE = Section("machine", "Machine", MachineConfig)
SERVER = Section("server", "Server", ServerConfig)
SECTIONS = (MODEL, KV, SCHEDULE, SAMPLING, TRACE, MACHINE, SERVER)


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


def _option_field(section: str, field: "Field[Any]", documented: Mapping[str, str]) -> OptionField:
    info = field.metadata.get("option")
    if not isinstance(info, OptionInfo):
        info = OptionInfo(documented.get(field.name, ""))
    assert field.default is not MISSING, f"{section}.{field.name} has no default"
    kind, sized = _kind(field.type)
    return OptionField(
        section=section,
        name=field.name,
        flag=info.flag or field.name.replace("_", "-"),
        kind=kind,
        sized=sized,
        default=field.default,
        help=info.help,
    )


def _kind(annotation: Any) -> tuple[type | types.GenericAlias, bool]:
    """What the command line reads for a field, and whether it is a size in bytes."""
    if get_origin(annotation) in (Union, types.UnionType):
        members = [member for member in get_args(annotation) if member is not type(None)]
        if set(members) == {int, str}:
            return str, True
        (annotation,) = members
    if get_origin(annotation) is tuple:
        return types.GenericAlias(list, (str,)), False
    assert annotation in (str, int, float, bool), f"no option can be made from {annotation}"
    return annotation, False
