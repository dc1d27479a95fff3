"""Units of a batch: a single request, or a whole group of sequences of one prompt.

waiting ---> prefill ---> prefilled: has its first output token ---> decoding ---> ended
"""

from quire.scheduler.request import Request, RequestGroup
from quire.scheduler.request_parts import RequestState
from quire.tenancy.fair_queue import FairQueue

Unit = Request | RequestGroup


def unit_of(request: Request) -> Unit:
    """Return the request's group, or the request itself without a group."""
    return request if request.group is None else request.group


def members_of(unit: Unit) -> list[Request]:
    """Return the active sequences of a unit."""
    return unit.members if isinstance(unit, RequestGroup) else [unit]


def num_rows(unit: Unit) -> int:
    """Number of rows of a unit, including reserved ones."""
    return unit.num_rows if isinstance(unit, RequestGroup) else 1


def count_rows(units: "dict[Unit, None]") -> int:
    """Number of rows of several units."""
    return sum(map(num_rows, units))


def has_ended(unit: Unit) -> bool:
    """Whether all members have finished."""
    return all(member.progress.state is RequestState.FINISHED for member in members_of(unit))


def holds_kv(unit: Unit) -> bool:
    """Whether any member is running."""
    return any(member.is_running for member in members_of(unit))


def was_preempted(unit: Unit) -> bool:
    """Whether any member was preempted after its first admission, resumed ones included."""
    return not holds_kv(unit) or any(
        member.progress.num_admissions > 1 for member in members_of(unit)
    )


def first_member(unit: Unit) -> Request:
    """Return the first active member, which represents the unit in the queue."""
    return members_of(unit)[0]


def waits(unit: Unit, waiting: FairQueue[Request]) -> bool:
    """Whether a unit is in the queue."""
    return not has_ended(unit) and first_member(unit) in waiting


def waits_to_decode(request: Request) -> bool:
    """Whether a running request has an output token and lacks only the KV of its last token."""
    return request.num_uncomputed == 1 and bool(request.output_token_ids)


def is_prefilled(unit: Unit) -> bool:
    """Whether some running member is ready to decode."""
    return any(member.is_running and waits_to_decode(member) for member in members_of(unit))
