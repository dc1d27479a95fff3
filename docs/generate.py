"""Generates the reference pages from the code: `make docs`; with `--check` only compares.

Whole files are written to docs/reference. In other documents the text between two marks is
generated:

    <!-- generated: NAME -->  ...  <!-- end -->
"""

import re
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "quire"
REFERENCE = Path("docs/reference")
HEADER = "<!-- Written by `make docs`. Change the code, not this file. -->\n\n"


def main(arguments: list[str]) -> int:
    """Write the documents, or with `--check` list stale documents; return the exit code."""
    stale = [path for path, text in documents() if _read(path) != text]
    for path, text in documents() if "--check" not in arguments else ():
        (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / path).write_text(text, encoding="utf-8")
    verb = "stale, run `make docs`" if "--check" in arguments else "written"
    for path in stale:
        sys.stdout.write(f"{path}: {verb}\n")
    return int("--check" in arguments and bool(stale))


def documents() -> Iterator[tuple[Path, str]]:
    """Yield every generated document with its current text."""
    yield REFERENCE / "cli.md", HEADER + cli()
    yield REFERENCE / "options.md", HEADER + options()
    yield REFERENCE / "policies.md", HEADER + policies()
    yield REFERENCE / "http.md", HEADER + http()
    yield REFERENCE / "models.md", HEADER + page_of("models_page")
    yield Path("docs/composition.md"), HEADER + composition()
    for name in (
        "add-a-policy.md",
        "dashboard.md",
        "eviction.md",
        "guides/own-model.md",
        "quantization.md",
        "serving.md",
    ):
        yield Path("docs") / name, fill(_read(Path("docs") / name))


def fill(text: str) -> str:
    """Replace the text between the marks of a document."""
    parts: dict[str, Callable[[], str]] = {
        "fields": server_fields,
        "eviction-limits": lambda: limits("eviction"),
        "codec-limits": lambda: limits("codec"),
        "codecs": codecs,
        "metrics": metrics,
        "models": models,
        "recent": lambda: code_block(SOURCE / "policies" / "recent.py"),
    }

    def made(match: "re.Match[str]") -> str:
        return f"{match[1]}\n{parts[match[2]]().rstrip()}\n<!-- end -->"

    return re.sub(r"(<!-- generated: (\S+) -->)\n.*?<!-- end -->", made, text, flags=re.DOTALL)


# ---- parts of documents ------------------------------------------------------------------------


def code_block(path: Path) -> str:
    """A file as Markdown."""
    return f"```python\n{path.read_text(encoding='utf-8')}```"


def limits(*areas: str) -> str:
    """Refused combinations of features."""
    from quire.layout.limits import LIMITS

    def shown(text: str) -> str:
        text = text.replace("budget {budget}", "it")
        text = "the message states why" if text == "{why}" else text.replace("{why}", "...")
        return re.sub(r"\{(\w+)[^}]*\}", lambda found: found[1].upper(), text)

    rows = [
        (row.one, row.other, shown(row.reason), shown(row.instead))
        for row in LIMITS
        if row.area in areas
    ]
    return _table(("this", "and this", "why not", "instead"), rows).rstrip()


def server_fields() -> str:
    """Fields of a request that the server ignores."""
    from quire.serve.fields import IGNORED

    ignored = ", ".join(f"`{name}`" for name in sorted(IGNORED))
    return f"Ignored: {ignored}."


# ---- whole documents ---------------------------------------------------------------------------


def cli() -> str:
    """Every command with a table of its options."""
    return str(runpy.run_path(str(ROOT / "docs" / "cli_reference.py"))["cli"]())


def options() -> str:
    """The fields of the config dataclasses."""
    from dataclasses import fields

    import quire.cli.main  # noqa: F401 - registers the options of commands
    from quire.cli.options import SECTIONS, command_sections, configs_of, documented_attributes
    from quire.layout.options import OptionInfo, choices_of, config_of

    parts = [
        "# Options\n\n"
        "Options have the same names in Python, in a TOML file and, with dashes, on the command\n"
        "line. A field without a flag is set in Python or in a request. `None` means unset: the\n"
        "model's default applies, if it has one. In a TOML file the model is\n"
        '`model = "..."`, or `name` in the table `[model]`.\n'
    ]
    for section, names, config in [
        (s, *found)
        for s in (*SECTIONS, *(own for own in command_sections() if own.in_file))
        for found in configs_of(s)
    ]:
        flags = {option.path: f"`--{option.flag}`" for option in section.options()}
        documented = documented_attributes(config.__doc__ or "")
        title = section.title if config is section.config else _heading(section.config, names[1])
        title = title or f"quire {section.name.replace('_', ' ')}"
        parts.append(f"\n## {title}: `{config.__name__}`, `[{'.'.join(names)}]`\n\n")
        parts.append("| field | flag | default | unit | meaning |\n|---|---|---|---|---|\n")
        for field in fields(config):
            info = field.metadata.get("option", OptionInfo())
            meaning = info.help or documented[field.name].removesuffix(".")
            held = config_of(field.type)
            choices = ", ".join(f"`{choice}`" for choice in choices_of(field.type))
            meaning += f" (one of {choices})" if choices else ""
            cells = (
                f"`{field.name}`",
                flags.get((*names[1:], field.name), ""),
                f"`{held.__name__}()`" if held else _default(field.default),
                info.unit,
                meaning.replace("|", "\\|"),
            )
            parts.append("| " + " | ".join(cells) + " |\n")
    return "".join(parts)


def _default(default: object) -> str:
    from dataclasses import MISSING

    if default is MISSING:
        return "required"
    return f"`{str(default)!r}`" if isinstance(default, Path) else f"`{default!r}`"


def _heading(config: type, name: str) -> str:
    """Of a config that another one holds: its heading in `--help`."""
    from dataclasses import fields

    [group] = [f.metadata["option"].group for f in fields(config) if f.name == name]
    return str(group)


def policies() -> str:
    """`full`, all registered policies and all budgets."""
    from quire.cli.listings import budget_rows, policy_rows
    from quire.layout.eviction import MAX_DEFAULT_EVERY

    rules = [
        (
            f"`{row.name}`",
            _named(row.options),
            row.summary,
            _listed(row.statistics),
            row.scope,
            row.cost,
            row.source,
        )
        for row in policy_rows()
    ]
    budgets = [
        (
            f"`{row.name}`",
            _named(row.options),
            row.summary,
            _listed(row.statistics),
            row.needs,
            "lanes * cap" if row.keeps_total else "not bounded",
            row.source,
        )
        for row in budget_rows()
    ]
    return (
        "# Eviction policies\n\n"
        "Written `name:option=value,option=value`, as in `--evict recent:cap=512,sinks=4`. Every\n"
        "policy except `full` also takes `cap` (maximum tokens per lane, a fraction of the prompt\n"
        "such as `25%`, or bytes such as `2MiB`; required), `every` (tokens per eviction;\n"
        f"default: an eighth of the cap, at most {MAX_DEFAULT_EVERY}), `when`, `budget`,\n"
        "`granularity` and `chunk_tokens`:\n"
        "see [eviction](../eviction.md).\n\n" + _table(_RULE_COLUMNS, rules) + "\n## Budgets\n\n"
        "A budget divides a cap over layers and heads, as in `budget=(pyramid:beta=20)`. If the\n"
        "total is not bounded, a lane may retain all tokens.\n\n" + _table(_BUDGET_COLUMNS, budgets)
    )


_RULE_COLUMNS = ("policy", "options", "retained tokens", "statistics", "retained set per", "cost")
_RULE_COLUMNS += ("source",)
_BUDGET_COLUMNS = ("budget", "options", "larger caps", "statistics", "reads the cache")
_BUDGET_COLUMNS += ("total", "source")


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    escaped = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in escaped)


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "none"


def _named(options: dict[str, object]) -> str:
    return ", ".join(f"`{name}={value}`" for name, value in options.items()) or "none"


def codecs() -> str:
    """All KV codecs with their sizes."""
    from quire.cli.listings import codec_rows
    from quire.layout.codec_names import PAIRS

    rows = [
        f"| `{row['name']}` | {row['code_bits']} | {row['effective_bits']:.4g} "
        f"| {row['vector_bytes']:.4g} | {row['options'] or 'none'} | {row['summary']} |"
        for row in codec_rows()
    ]
    pairs = [f"| `{name}` | `{key}` | `{value}` |" for name, (key, value) in PAIRS.items()]
    return (
        "`--kv-codec none` (default) stores KV in the model's dtype. Bytes are those\n"
        "of 128 elements in pages of 32 tokens, including scales and other data for decoding.\n"
        "Effective bits are these bytes per element.\n\n"
        "| codec | bits | effective bits | bytes per 128 elements | options | format |\n"
        "|---|---|---|---|---|---|\n" + "\n".join(rows) + "\n\n"
        "Names of pairs:\n\n"
        "| name | keys | values |\n|---|---|---|\n" + "\n".join(pairs) + "\n"
    )


def models() -> str:
    """The refused architectures with the reasons."""
    from quire.layout.limits import REFUSED

    rows = [
        "| "
        + ", ".join(f"`{name}`" for name, found in REFUSED.items() if found is refusal)
        + f" | {refusal.reason} | {refusal.instead} |"
        for refusal in dict.fromkeys(REFUSED.values())
    ]
    return (
        "Refused by `model_type`, before weights are read:\n\n"
        "| model_type | because | use instead |\n|---|---|---|\n" + "\n".join(rows) + "\n\n"
        "Refused by config or class: an encoder or a second modality, and in other models than\n"
        "those above an indexer, chunked attention or layers that share keys and values; a\n"
        "recurrent state of unknown shape, RoPE scaling of type `dynamic`, attention without the\n"
        "interface, and models without `position_ids`.\n"
    )


def page_of(name: str) -> str:
    """A page that a script of its own makes from committed results."""
    return str(runpy.run_path(str(ROOT / "docs" / f"{name}.py"))["page"](ROOT))


def composition() -> str:
    """Which features work together, by the committed results."""
    made = page_of("composition_page")
    others = limits("offload", "ranks", "scheduling", "batch invariance", "sparse attention")
    return (
        f"{made}\n## Limits\n\n"
        "Reasons of refusals. Those of [eviction](eviction.md#refused-combinations) and\n"
        f"[codecs](quantization.md#refused-combinations) are on their pages.\n\n{others}\n"
    )


def metrics() -> str:
    """The metrics of the server."""
    from quire.serve.metrics.definitions import METRICS, PREFIX, VLLM_PREFIX

    rows = [
        (
            f"`{PREFIX}{metric.name}{'_total' if metric.kind == 'counter' else ''}`",
            "gauge" if metric.kind == "info" else metric.kind,
            ", ".join(f"`{label}`" for label in metric.labels),
            metric.help,
            f"`{VLLM_PREFIX}{metric.vllm}`" if metric.vllm else "",
        )
        for metric in METRICS
    ]
    return (
        "`GET /metrics` returns these metrics in Prometheus' text format, or in\n"
        "OpenMetrics if the client accepts it. Every metric has the label `model_name`.\n"
        "`--metrics-names vllm` or `both` selects the names of vLLM, with the label `engine`;\n"
        "counters of vLLM get `_total` too. Histograms have the buckets of vLLM. Metrics of the\n"
        "process (`process_...`, `python_...`) are included.\n\n"
        + _table(("metric", "type", "labels", "meaning", "in vLLM"), rows)
    )


def http() -> str:
    """The paths, fields, errors and headers of the server."""
    from quire.cli.options import documented_attributes
    from quire.config.generation_request import GenerationRequest
    from quire.config.sampling_params import SamplingParams

    configs = (SamplingParams, GenerationRequest)
    texts = [documented_attributes(config.__doc__ or "") for config in configs]
    page = runpy.run_path(str(ROOT / "docs" / "http_reference.py"))
    return str(page["http"](texts[0] | texts[1]))


def _read(path: Path) -> str:
    found = ROOT / path
    return found.read_text(encoding="utf-8") if found.is_file() else ""


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
