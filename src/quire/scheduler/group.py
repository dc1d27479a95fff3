"""Request groups: sequences of one prompt that are prefilled once and forked.

    tokens      prompt ........ a b c d     member 0 is prefilled from the start
                                | └ x y     member 2 is forked after b and computes x y itself
                                └ k l m     member 1 is forked after the prompt

The first member is prefilled alone. Each other member starts as a fork of a member that has
computed their common tokens. So no token is computed twice, and a recomputation after a preemption
restores page sharing. Torch-free functions; the scheduler calls them.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise, takewhile

import numpy as np

from quire.errors import RequestError
from quire.kv.memory import KVMemory
from quire.layout.eviction import PRESSURE, UNLIMITED
from quire.scheduler.request import PlannedFork, Request, RequestGroup
from quire.scheduler.schedule_config import ScheduleConfig


def refuse_beams(request: Request, config: ScheduleConfig) -> None:
    """Refuse a beam search whose beams can never decode in one step.

    Raises:
        RequestError: states the number of beams and the option that limits them.
    """
    if request.group is None or not request.group.atomic:
        return
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        if num_rows(request) > getattr(config, name):
            raise RequestError(
                f"expected at most {name}={getattr(config, name)} beams, got {num_rows(request)}: "
                f"use fewer beams or raise --{name.replace('_', '-')}",
                param="beam_width",
            )


def dissolve(request: Request) -> list[Request]:
    """Split a group that cannot run as a whole into single requests; return them.

    Beams stay a group, because they must decode in the same step.
    """
    sequences, group = together(request), request.group
    if group is None or group.atomic:
        return [request]
    for sequence in sequences:
        sequence.group, sequence.split_from = None, group
    return sequences


def num_rows(request: Request) -> int:
    """Number of rows of a request, or of its whole group."""
    return 1 if request.group is None else request.group.num_rows


def reserved_rows(running: Iterable[Request]) -> int:
    """Rows that running groups will take but have not taken yet."""
    groups = {id(r.group): r.group for r in running if r.group is not None}.values()
    return sum(len(group.spare) + sum(not m.is_running for m in group.members) for group in groups)


def together(request: Request) -> list[Request]:
    """Return the request with all members of its group: they are preempted together."""
    return [request] if request.group is None else list(request.group.members)


def copies_to_come(requests: Iterable[Request]) -> list[Request]:
    """Return the members that are planned as forks in the groups of these requests."""
    groups = {id(r.group): r.group for r in requests if r.group is not None}.values()
    return [planned.child for group in groups for planned in group.forks]


def have_moved_on(request: Request) -> bool:
    """Whether a request and its group are new, or computed tokens since their last admission."""
    return all(
        member.progress.num_admissions <= 1
        or (member.is_running and member.num_tokens > member.progress.admitted_tokens)
        for member in together(request)
    )


def same_group(one: Request, other: Request) -> bool:
    """Whether two requests are of one group, so that neither is preempted for the other."""
    return one.group is not None and one.group is other.group


def plan_prefill(request: Request) -> Request:
    """Plan which member of a group is prefilled first, and where the others are forked; return it.

    Members share tokens only up to the first eviction that differs between them: after it, their
    retained tokens and their chunks differ.

    Args:
        request: any member, or a request without a group, which is returned itself.
    """
    group = request.group
    if group is None:
        return request
    ordered = sorted(group.members, key=lambda member: member.output_token_ids)
    origin: dict[int, PlannedFork] = {}
    for parent, child in pairwise(ordered):
        tokens = _common_tokens(parent, child)
        if tokens < child.num_tokens:
            tokens = min(tokens, _equal_eviction_tokens(parent, child))
        while id(parent) in origin and origin[id(parent)].tokens >= tokens:
            parent = origin[id(parent)].parent  # an earlier member has computed these tokens too
        origin[id(child)] = PlannedFork(child, parent, tokens)
    group.forks = list(origin.values())
    return ordered[0]


def _common_tokens(one: Request, other: Request) -> int:
    pairs = zip(one.output_token_ids, other.output_token_ids, strict=False)
    equal = takewhile(lambda pair: pair[0] == pair[1], pairs)
    return len(one.prompt_token_ids) + sum(1 for _ in equal)


def _equal_eviction_tokens(one: Request, other: Request) -> int:
    """Tokens up to which two members have evicted the same tokens."""
    pairs = zip(one.eviction.trace, other.eviction.trace, strict=False)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] is pair[1], pairs))
    if not same:
        return min(one.exact_tokens, other.exact_tokens)
    own = [entry.num_computed for r in (one, other) for entry in r.eviction.trace[same : same + 1]]
    last = one.eviction.trace[same - 1].num_computed + 1  # one token computed after the eviction
    return max(last, min(own, default=UNLIMITED if one.eviction.spec.when == PRESSURE else last))


def prefillable_tokens(request: Request) -> int:
    """Tokens that a request may compute in one chunk: up to its next fork.

    The last token of a beam is computed in the step in which all beams decode.
    """
    group, tokens = request.group, request.num_uncomputed
    if group is None:
        return tokens
    if group.atomic and len(group.members) > 1:
        tokens -= 1
    stops = (f.tokens - request.progress.num_computed for f in group.forks if f.parent is request)
    return min(tokens, min(stops, default=tokens))


def whole_groups(decoding: list[Request]) -> list[Request]:
    """Remove members of atomic groups whose members are not all in the list."""
    present: dict[int, int] = {}
    for request in decoding:
        if request.group is not None and request.group.atomic:
            present[id(request.group)] = present.get(id(request.group), 0) + 1
    if not present:
        return decoding
    return [
        r
        for r in decoding
        if r.group is None or not r.group.atomic or present[id(r.group)] == len(r.group.members)
    ]


def due_forks(request: Request) -> list[PlannedFork]:
    """Remove and return the planned forks for which a request has computed enough tokens."""
    group = request.group
    if group is None or not group.forks:
        return []
    due = [
        f for f in group.forks if f.parent is request and f.tokens <= request.progress.num_computed
    ]
    for planned in due:
        group.forks.remove(planned)
    return due


def not_continued(group: RequestGroup, parents: Sequence[int]) -> list[Request]:
    """Members that no new member continues; see `branch`."""
    return [member for i, member in enumerate(group.members) if i not in parents]


def branch(
    group: RequestGroup, parents: Sequence[int], copy: Callable[[Request, Request], None]
) -> None:
    """Replace the members of a group: new member i continues old member `parents[i]`.

    The first new member that continues an old one takes its row; further ones are forks. An old
    member without continuation becomes spare; its KV must have been freed before.

    Args:
        group: a group of running members.
        parents: for each new member, the index of the member that it continues.
        copy: called with (parent, child); forks the KV of the parent for a member without KV.
    """
    old = group.members
    spare = group.spare + not_continued(group, parents)
    group.members, seen = [], set()
    for number in parents:
        member = old[number]
        if number in seen:
            member = spare.pop()
            copy(old[number], member)
            member.progress.output_token_ids = list(old[number].output_token_ids)
            member.progress.num_preemptions = old[number].progress.num_preemptions
        seen.add(number)
        group.members.append(member)
    group.spare = spare


def leave(request: Request) -> bool:
    """Remove an ended request from its group; return whether forks were planned from it.

    If so, the prefill of the others must be planned again.
    """
    group = request.group
    if group is None or request not in group.members:
        return False
    group.members.remove(request)
    group.forks = [f for f in group.forks if f.child is not request]
    return any(f.parent is request for f in group.forks)


def note_peak(memory: KVMemory, group: RequestGroup) -> None:
    """Update the peak bytes of a group; call before any of its rows frees pages."""
    held = bytes_of([member for member in group.members if member.memory.row >= 0], memory)
    group.kv_peak_bytes = max(group.kv_peak_bytes, held)


def bytes_of(requests: Sequence[Request], memory: KVMemory) -> int:
    """Bytes of all pages of running requests; a shared page counts once."""
    return distinct_bytes(memory, [request.memory.row for request in requests])


def distinct_bytes(memory: KVMemory, rows: Sequence[int], *, staging: bool = True) -> int:
    """Bytes of all pages that any of these rows refers to, each counted once.

    Args:
        memory: the KV memory.
        rows: rows in use.
        staging: whether staging pages of offloaded KV count.
    """
    total, index = 0, np.asarray(rows, dtype=np.int64)
    for table in memory.tables.values():
        pages = table.pages[index]
        counted = pages >= 0
        if not staging:
            counted &= np.arange(table.capacity) >= table.staged[index][:, None, None]
        total += len(np.unique(pages[counted])) * table.group.page_class.page_bytes
    return total


def sequence_id(request_id: str, index: int) -> str:
    """The id of one of the sequences of a request; the first has the request's own."""
    return f"{request_id}#{index}" if index else request_id


def make_sequences(request: Request) -> list[Request]:
    """Create the sequences of a request (n, best_of or beams); the request is the first.

    Sequence i samples with the request's seed + i, so the first samples as it would alone. Prompt
    log-probabilities are computed for the first only. In a beam search only the first is a member
    of the group at the start; the others are spare.
    """
    params = request.params
    if params.num_sequences == 1 and not params.use_beam_search:
        return [request]
    group = RequestGroup(request.request_id, atomic=params.use_beam_search)
    request.group = group
    sequences = [_sibling(request, index) for index in range(params.num_sequences)]
    last = 1 if group.atomic else len(sequences)
    group.members, group.spare = sequences[:last], sequences[last:]
    return sequences


def _sibling(request: Request, index: int) -> Request:
    params = request.params
    scored = not index or not params.max_tokens  # required if no tokens are generated
    spec = replace(
        request.spec,
        request_id=sequence_id(request.request_id, index),
        sampling_seed=request.sampling_seed + index,
        arrival=request.spec.arrival + index,
        params=replace(
            params,
            seed=None,  # it would take precedence over `sampling_seed`
            prompt_logprobs=params.prompt_logprobs if scored else None,
            logprobs=0 if params.ranked and params.logprobs is None else params.logprobs,
        ),
    )
    return Request(
        spec,
        memory=replace(request.memory),
        eviction=replace(request.eviction, trace=[]),
        group=request.group,
        matcher=None if request.matcher is None else request.matcher.fork(),
    )
