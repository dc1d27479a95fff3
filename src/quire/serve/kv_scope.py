"""What a client may see of the engine: everything, or only the part of its tenant."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import Request

from quire.scheduler.events import KVEvent, Value
from quire.serve.errors import FieldError
from quire.serve.fields import nearest, shown_name
from quire.serve.service import Service
from quire.serve.tenant_keys import tenant_of

_OTHER_TENANT = re.compile(r"^tenant (\S+)")


def only_tenant(service: Service, request: Request) -> str | None:
    """The tenant whose rows the client may see; None: all, if no tenant has a key."""
    return tenant_of(request) if service.keys.tells_tenants_apart else None


def event_of(event: KVEvent, tenant: str | None) -> dict[str, Value]:
    """A KV event as JSON values, without the names of other tenants.

    Args:
        event: an event that the client may see.
        tenant: tenant of the client; None: the client may see all tenants.
    """
    return without_other_tenants(event.as_dict(), tenant)


def without_other_tenants(event: Mapping[str, Any], tenant: str | None) -> dict[str, Any]:
    """Replace the name of another tenant in the reason of an event."""
    shown = dict(event)
    reason = shown.get("reason")
    if tenant is not None and isinstance(reason, str):
        named = _OTHER_TENANT.match(reason)
        if named is not None and named[1] != tenant:
            shown["reason"] = f"another tenant{reason[named.end() :]}"
    return shown


def refuse_unknown_parameters(request: Request, known: Sequence[str]) -> None:
    """Refuse query parameters that are similar to a known parameter.

    Raises:
        FieldError: names the similar parameter.
    """
    for name in request.query_params:
        near = None if name in known else nearest(name, known)
        if near is not None:
            shown = shown_name(name)
            raise FieldError(shown, f"unknown parameter `{shown}`: did you mean `{near}`?")
