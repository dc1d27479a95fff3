"""The metrics of several replicas as one text: each sample gets the label `replica`."""

from collections.abc import Mapping
from dataclasses import dataclass, field

LABEL = "replica"


@dataclass(slots=True)
class _Family:
    comments: list[str] = field(default_factory=list)
    samples: list[str] = field(default_factory=list)


def merged_metrics(texts: Mapping[str, str]) -> str:
    """Merge metrics in Prometheus' text format.

    Prometheus needs all samples of a metric together, so they are sorted by metric, not by replica.
    """
    families: dict[str, _Family] = {}
    for replica, text in texts.items():
        label = f'{LABEL}="{_escaped(replica)}"'
        family = families.setdefault("", _Family())
        for line in text.splitlines():
            if line.startswith("# "):
                family = families.setdefault(line.split(" ", 3)[2], _Family())
                if line not in family.comments:
                    family.comments.append(line)
            elif line:
                family.samples.append(_with_label(line, label))
    lines = (line for found in families.values() for line in (*found.comments, *found.samples))
    return "".join(f"{line}\n" for line in lines)


def _with_label(sample: str, label: str) -> str:
    """Add a label to a line such as `name 1.0` or `name{a="b"} 1.0`."""
    name, brace, rest = sample.partition("{")
    if brace and " " not in name:
        return f"{name}{{{label}{'' if rest.startswith('}') else ','}{rest}"
    name, _, value = sample.partition(" ")
    return f"{name}{{{label}}} {value}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
