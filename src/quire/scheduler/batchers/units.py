"""What a batch is counted in: a request, or the group that answers one prompt, which stays whole.

waits ---> reads its prompt ---> prefilled: has its first token ---> decodes ---> has ended
"""

from quire.scheduler.request import Request, RequestGroup
from quire.scheduler.request_parts import RequestState
from quire.tenancy.fair_queue import FairQueue

Unit = Request | RequestGroup


def unit_of(request: Request) -> Unit:
    """Its group, or itself where it is alone."""
    return request if request.group is None else request.group


def members_of(unit: Unit) -> list[Request]:
    """The sequences that go on."""
    return unit.members if isinstance(unit, RequestGroup) else [unit]


def num_rows(unit: Unit) -> int:
    """Rows it takes, those of members to come included."""
    return unit.num_rows if isinstance(unit, RequestGroup) else 1


def count_rows(units: "dict[Unit, None]") -> int:
    """Rows of several."""
    return sum(map(num_rows, units))


def has_ended(unit: Unit) -> bool:
    """Whether nothing of it goes on."""
    return all(member.progress.state is RequestState.FINISHED for member in members_of(unit))


def holds_kv(unit: Unit) -> bool:
    """Whether any of it runs."""
    return any(member.is_running for member in members_of(unit))


def has_left(unit: Unit) -> bool:
    """Whether any of it has given way since it first entered, and may be back."""
    return not holds_kv(unit) or any(
        member.progress.num_admissions > 1 for member in members_of(unit)
    )


def first_member(unit: Unit) -> Request:
    """The one that waits for all of it, in the queue; it has not ended."""
    return members_of(unit)[0]


def waits(unit: Unit, waiting: FairQueue[Request]) -> bool:
    """Whether it stands in the queue."""
    return not has_ended(unit) and first_member(unit) in waiting


def waits_to_decode(request: Request) -> bool:
    """Whether a running request has had a token and lacks nothing but the KV of its last one."""
    return request.num_uncomputed == 1 and bool(request.output_token_ids)


def is_prefilled(unit: Unit) -> bool:
    """Whether some of it runs and could decode."""
    return any(member.is_running and waits_to_decode(member) for member in members_of(unit))
