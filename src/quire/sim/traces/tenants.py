"""Who sends which request of a trace.

column:NAME                 the file says it, in a column or key of this name
round_robin:a,b,c           in turns
share:big=0.95,small=0.05   drawn with these shares
"""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from quire.errors import ConfigError
from quire.sim.traces.base import TraceRequest

COLUMN, ROUND_ROBIN, SHARE = "column", "round_robin", "share"
_FORMS = "column:NAME, round_robin:a,b or share:a=0.9,b=0.1"


def tenant_column(text: str) -> str | None:
    """The column that names the tenant; None where the file does not say.

    Raises:
        ConfigError: not a way to assign tenants.
    """
    kind, _, rest = text.partition(":")
    if not text:
        return None
    if kind not in (COLUMN, ROUND_ROBIN, SHARE) or not rest.strip():
        raise ConfigError(f"expected tenants as {_FORMS}, got {text!r}")
    return rest.strip() if kind == COLUMN else None


def assign_tenants(
    requests: Sequence[TraceRequest], text: str, *, seed: int
) -> Sequence[TraceRequest]:
    """The requests with the tenants that `text` gives them.

    Args:
        requests: in the order of arrival.
        text: see above; "" and `column` leave them as they are.
        seed: of the draws of `share`.

    Raises:
        ConfigError: a name twice, or a share that is none.
    """
    kind, _, rest = text.partition(":")
    if kind not in (ROUND_ROBIN, SHARE):
        return requests
    names = _in_turns(rest) if kind == ROUND_ROBIN else _drawn(rest, seed)
    return [replace(request, tenant=name) for request, name in zip(requests, names, strict=False)]


def _in_turns(rest: str) -> Iterator[str]:
    return itertools.cycle(_distinct([name.strip() for name in rest.split(",")]))


def _drawn(rest: str, seed: int) -> Iterator[str]:
    parts = [part.partition("=") for part in rest.split(",")]
    names = _distinct([name.strip() for name, _, _ in parts])
    shares = [_share(name, value) for name, (_, _, value) in zip(names, parts, strict=True)]
    draws = random.Random(seed)
    return (draws.choices(names, shares)[0] for _ in itertools.count())


def _distinct(names: list[str]) -> list[str]:
    if not all(names) or len(set(names)) != len(names):
        raise ConfigError(f"expected tenants as {_FORMS}, each named once, got {','.join(names)!r}")
    return names


def _share(name: str, text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share < float("inf"):
        raise ConfigError(f"expected a share above 0 for tenant {name!r}, got {text!r}")
    return share
