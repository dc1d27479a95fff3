"""The reference of the commands: a table of options for each command, written from the program.

Commands with the same options refer to one table of them.
"""

import inspect
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

INTRODUCTION = """# Commands

A table has all options of a command. Its `--help` shows the common ones, `--help-all` the
others too. The model is the first argument of every command that takes one. `--config FILE.toml`
reads [options](options.md) from a file.

`quire --install-completion` installs completion of commands, options, policies, codecs, choices
and model folders for the current shell (bash, zsh, fish, PowerShell). Start a new shell to use
it. Output is coloured on terminals only; `NO_COLOR=1` turns colours off. With `--json`, standard
output is one line of JSON, and other texts are written to standard error.
"""
SHARED = """## Shared options

These options are equal in all commands that refer to them.
"""
HEADER = "| option | value | default | description |\n|---|---|---|---|\n"
NOT_LISTED = {"help", "help_all"}
VALUES = {"str": "text", "list[str]": "text", "bool": ""}
"""Placeholders of values without a name of their own, for types that have no units."""


@dataclass
class Command:
    """A command with its options: the line of a table by option, by heading."""

    words: tuple[str, ...]
    usage: str
    text: str
    children: list[tuple[str, str]]
    groups: dict[str, dict[str, str]] = field(default_factory=dict)


def cli() -> str:
    """Every command with a table of its options."""
    from typer.main import get_command

    from quire.cli.main import app

    commands = [*_commands(get_command(app), ("quire",))]
    shared = _shared(commands)
    parts = [INTRODUCTION, *(_section(command, shared) for command in commands), SHARED]
    parts += [f"### {title}\n\n{HEADER}{''.join(rows.values())}" for title, rows in shared.items()]
    return "\n".join(parts)


def _commands(command: Any, words: tuple[str, ...]) -> Iterator[Command]:
    from click import Context

    context = Context(command, info_name=" ".join(words))
    children = getattr(command, "commands", {})
    usage = [" ".join(words), *(["COMMAND"] if children else ["[OPTIONS]"])]
    groups: dict[str, dict[str, str]] = {}
    for parameter in command.get_params(context):
        if parameter.param_type_name == "argument":
            usage.append(parameter.metavar if parameter.required else f"[{parameter.metavar}]")
        if parameter.name not in NOT_LISTED:
            title = getattr(parameter, "rich_help_panel", None) or ""
            groups.setdefault(title, {})[_names(parameter)] = _row(parameter, context)
    yield Command(
        words,
        " ".join(usage).replace("{", "").replace("}", ""),
        inspect.cleandoc(command.help or ""),
        [(name, inspect.cleandoc(child.help or "")) for name, child in children.items()],
        groups,
    )
    for name, child in children.items():
        yield from _commands(child, (*words, name))


def _shared(commands: list[Command]) -> dict[str, dict[str, str]]:
    """By heading: the options that at least two commands have, each in its most frequent form."""
    counts: dict[str, dict[str, Counter[str]]] = {}
    for command in commands:
        for title, rows in command.groups.items():
            for names, row in rows.items() if title else ():
                counts.setdefault(title, {}).setdefault(names, Counter())[row] += 1
    most = {
        title: {names: forms.most_common(1)[0] for names, forms in options.items()}
        for title, options in counts.items()
    }
    return {
        title: {names: row for names, (row, number) in rows.items() if number > 1}
        for title, rows in most.items()
        if any(number > 1 for _, number in rows.values())
    }


def _section(command: Command, shared: dict[str, dict[str, str]]) -> str:
    """A command: its text, its own options, and references to the shared ones."""
    own, references = "", []
    for title, rows in command.groups.items():
        common = shared.get(title, {})
        left_out = [names for names in common if rows.get(names) != common[names]]
        if not common or 2 * len(left_out) > len(common):
            own += "".join(rows.values())
            continue
        own += "".join(row for names, row in rows.items() if common.get(names) != row)
        without = f" without {', '.join(left_out)}" if left_out else ""
        references.append(f"[{title}](#{title.lower().replace(' ', '-')}){without}")
    parts = [f"## {' '.join(command.words)}", f"`{command.usage}`", command.text]
    if command.children:
        listed = (
            f"| [{name}](#{'-'.join((*command.words, name))}) | {_cell(_paragraph(text))} |\n"
            for name, text in command.children
        )
        parts.append("| command | description |\n|---|---|\n" + "".join(listed).rstrip())
    if own:
        parts.append((HEADER + own).rstrip())
    if references:
        parts.append(f"Shared options: {'; '.join(references)}.")
    return "\n\n".join(part for part in parts if part) + "\n"


def _paragraph(text: str) -> str:
    return text.split("\n\n", maxsplit=1)[0]


def _row(parameter: Any, context: Any) -> str:
    default = _default(parameter)
    cells = (
        _names(parameter),
        _value(parameter, context),
        f"`{default}`" if default else "required" if parameter.required else "",
        _cell(" ".join((parameter.help or "").split())),
    )
    return "| " + " | ".join(cells) + " |\n"


def _default(parameter: Any) -> str:
    """The default, unless it is unset or a flag that is off."""
    default = parameter.default
    unset = default is False or default in (None, "", [], ()) or callable(default)
    if unset or not getattr(parameter, "show_default", True):
        return ""
    if isinstance(default, list | tuple):
        return ", ".join(map(str, default))
    return str(parameter.opts[0] if default is True else default)


def _names(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{str(parameter.metavar).strip('{}')}`"
    names = sorted(parameter.opts, key=lambda name: not name.startswith("--"))
    return ", ".join(f"`{name}`" for name in (*names, *parameter.secondary_opts))


def _value(parameter: Any, context: Any) -> str:
    """Choices of an option, its placeholder or its type; empty for a flag and an argument."""
    if parameter.param_type_name == "argument" or parameter.is_flag:
        return ""
    value = str(parameter.metavar or "")
    if value.startswith("[") and "|" in value:
        return ", ".join(f"`{choice}`" for choice in value.strip("[]").split("|"))
    if value:
        return value
    described = getattr(parameter, "display_type_rich", None)
    name = str(described(context)) if described else str(parameter.type.name)
    name = name.strip("<>").removesuffix(" range")
    return VALUES.get(name, name)


def _cell(text: str) -> str:
    """Text for a cell of a table."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("\n", " ")
