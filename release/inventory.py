"""Inventory of all public names as JSON: flags, fields, specs, rules, endpoints, formats.

`PYTHONPATH=src:. python release/inventory.py > NEW.json` writes the inventory of a checkout, and
`python release/inventory.py OLD.json NEW.json` prints the names of one that the other lacks.
"""

import dataclasses
import json
import pkgutil
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for the benchmarks package
OPTIONAL = ("lm_eval", "ray")
"""Packages that are not always installed."""


def inventory() -> dict[str, object]:
    """Names of each kind, sorted."""
    return {
        "commands": commands(),
        "fields": fields(),
        "eviction": eviction(),
        "codecs": codecs(),
        "registries": registries(),
        "endpoints": endpoints(),
        "json": json_classes(),
        "events": events(),
        "formats": formats(),
        "claims": claims(),
        "errors": errors(),
        "public": public(),
    }


def commands() -> dict[str, list[str]]:
    """Commands with their parameters and defaults."""
    from typer.main import get_command

    from benchmarks.__main__ import app as benchmarks
    from quire.cli.main import app

    found = [
        *_commands(get_command(app), ()),
        *_commands(get_command(benchmarks), ("python -m benchmarks",)),
    ]
    return {" ".join(words): parameters for words, parameters in sorted(found)}


def _commands(command: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    yield words, sorted(_parameter(parameter) for parameter in command.params)
    for name, child in getattr(command, "commands", {}).items():
        yield from _commands(child, (*words, name))


def _parameter(parameter: Any) -> str:
    names = "/".join((*parameter.opts, *parameter.secondary_opts))
    return f"{names}={parameter.default!r}"


def fields() -> dict[str, list[str]]:
    """Configurations with their fields and defaults."""
    from quire.cli.options import SECTIONS, configs_of
    from quire.layout.options import config_of

    return {
        config.__name__: sorted(
            f"{field.name}={field.default!r}"
            for field in dataclasses.fields(config)
            if config_of(field.type) is None
        )
        for section in SECTIONS
        for _, config in configs_of(section)
    }


def eviction() -> dict[str, object]:
    """Eviction rules and budgets with their options, and the fields of a spec."""
    from quire.cli.listings import budget_rows, policy_rows

    return {
        "rules": {row.name: _texts(row.options) for row in policy_rows()},
        "statistics": {row.name: list(row.statistics) for row in policy_rows()},
        "budgets": {row.name: _texts(row.options) for row in budget_rows()},
        "spec": sorted(_fields_of("eviction", "EvictionSpec")),
        "schedules": sorted(_constant("eviction", "SCHEDULES")),
    }


def codecs() -> dict[str, object]:
    """Codecs with their options, named pairs, and the fields of a spec."""
    from quire.cli.listings import codec_rows

    return {
        "codecs": {str(row["name"]): str(row["options"]) for row in codec_rows()},
        "pairs": {name: list(pair) for name, pair in _constant("codec_names", "PAIRS").items()},
        "spec": sorted(_fields_of("kv_format", "KVFormat")),
    }


def registries() -> dict[str, list[str]]:
    """Choices of options that select from a registry."""
    from quire.evals.tasks import FAMILIES
    from quire.kernels.select import BACKENDS

    return {
        "admission": sorted(_constant("admission.rules", "RULES")),
        "batchers": sorted(_constant("batchers.registry", "BATCHERS")),
        "dense batchers": _dense_batchers(),
        "backends": sorted(BACKENDS),
        "tasks": sorted(FAMILIES),
        "trace formats": _trace_formats(),
        "preemption": sorted(get_args(_constant("schedule_config", "Preemption"))),
        "objectives": sorted(get_args(_constant("schedule_config", "Objective"))),
        "refused models": sorted(_constant("refusals", "REFUSED")),
    }


def _dense_batchers() -> list[str]:
    from quire.scheduler.batchers import DENSE_BATCHERS

    return sorted(DENSE_BATCHERS)


def _trace_formats() -> list[str]:
    import quire.sim.traces
    from quire.sim.traces import registry

    assert quire.sim.traces
    return sorted(registry._FORMATS)


def endpoints() -> dict[str, object]:
    """Routes of the server, and the fields of the request and response bodies."""
    from pydantic import BaseModel

    import quire.serve.protocol as chat_messages
    import quire.serve.protocol as protocol

    routes = sorted(
        {
            found
            for path in (ROOT / "src" / "quire" / "serve").rglob("*.py")
            for found in re.findall(r'"(/[a-z0-9_/{}:]+)"', path.read_text(encoding="utf-8"))
        }
    )
    bodies = {
        name: sorted(kind.model_fields)
        for name, kind in {**vars(chat_messages), **vars(protocol)}.items()
        if isinstance(kind, type) and issubclass(kind, BaseModel) and kind is not BaseModel
    }
    return {"routes": routes, "bodies": dict(sorted(bodies.items()))}


_JSON_CLASSES = (
    "EngineStats",
    "RequestBytes",
    "TenantBytes",
    "TenantStats",
    "TierStats",
    "Usage",
    "RequestOutput",
    "OutputDelta",
    "KVEvent",
    "PartResult",
    "Table",
    "Chart",
    "HeatMap",
    "Spans",
    "Ceilings",
    "RequestRecord",
)


def json_classes() -> dict[str, list[str]]:
    """Dataclasses whose fields become keys of a JSON output."""
    found = {
        name: sorted(field.name for field in dataclasses.fields(kind))
        for module in _modules()
        for name, kind in vars(module).items()
        if name in _JSON_CLASSES and dataclasses.is_dataclass(kind)
    }
    return dict(sorted(found.items()))


def events() -> list[str]:
    """Kinds of ledger events, and published block events with their fields."""
    kinds = list(_constant("events", "KINDS"))
    published = _constant("block_events", "_FIELDS").items()
    return sorted([*kinds, *(f"published {name}: {', '.join(of)}" for name, of in published)])


def formats() -> dict[str, str]:
    """Formats of files, with their versions."""
    found = {}
    for path in (ROOT / "src" / "quire").rglob("*.py"):
        for line in path.read_text(encoding="utf-8").splitlines():
            name, equals, value = line.partition(" = ")
            if equals and name.isupper() and name.endswith(("FORMAT", "MAGIC", "VERSION")):
                found[f"{path.stem}.{name.strip('_')}"] = value
    return dict(sorted(found.items()))


def claims() -> dict[str, list[str]]:
    """Claims of the recorded benchmark runs."""
    return {
        path.stem: sorted(json.loads(path.read_text(encoding="utf-8")).get("claims", {}))
        for path in sorted((ROOT / "docs" / "results").glob("*.json"))
    }


def errors() -> list[str]:
    """Error classes."""
    import quire.errors

    return sorted(
        name
        for name, kind in vars(quire.errors).items()
        if isinstance(kind, type) and issubclass(kind, Exception)
    )


def public() -> list[str]:
    """Names that `import quire` exports."""
    import quire

    return sorted(quire.__all__)


# ---- lookup of names independent of their module -------------------------------------------------


def _modules() -> Iterator[ModuleType]:
    import importlib

    import benchmarks
    import quire

    for package in (quire, benchmarks):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if module.name.rpartition(".")[2].startswith("_"):
                continue
            try:
                yield importlib.import_module(module.name)
            except ModuleNotFoundError as error:
                if error.name not in OPTIONAL:
                    raise


def _constant(module: str, name: str) -> Any:
    """Find a name in a module; in another module if that one was merged or moved."""
    having = [found for found in _modules() if name in vars(found)]
    exact = [found for found in having if found.__name__.endswith(f".{module}")]
    return getattr((exact or having)[0], name)


def _fields_of(module: str, name: str) -> Iterable[str]:
    for field in dataclasses.fields(_constant(module, name)):
        required = field.default is dataclasses.MISSING
        yield field.name if required else f"{field.name}={field.default!r}"


def _texts(options: Mapping[str, object]) -> list[str]:
    return sorted(f"{name}={value}" for name, value in options.items())


# ---- comparison ----------------------------------------------------------------------------------


def names(found: object, path: str = "") -> Iterator[str]:
    """Each key and leaf of an inventory as one string."""
    if isinstance(found, Mapping):
        for key, value in found.items():
            yield f"{path}/{key}"
            yield from names(value, f"{path}/{key}")
    elif isinstance(found, list):
        for value in found:
            yield f"{path}: {value}"
    else:
        yield f"{path}: {found}"


def main(arguments: list[str]) -> int:
    """Print the inventory, or the differences of two; return the exit code."""
    if not arguments:
        sys.stdout.write(json.dumps(inventory(), indent=1) + "\n")
        return 0
    old, new = (list(names(json.loads(Path(path).read_text("utf-8")))) for path in arguments)
    before, now = set(old), set(new)
    lines = [f"removed: {name}\n" for name in old if name not in now]
    lines += [f"added: {name}\n" for name in new if name not in before]
    sys.stdout.write("".join(lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
