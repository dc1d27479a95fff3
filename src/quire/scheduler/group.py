"""Sequences forked from one prompt: who reads, who is copied, what they need together.

    tokens      prompt ........ a b c d     member 0 is read from the start
                                | └ x y     member 2 is forked behind b, and reads x y itself
                                └ k l m     member 1 is forked behind the prompt

The first of a group is read alone; the others begin as copies of a member that has read what they
have in common, so no token is read twice and shared pages are shared again after a preemption.
Torch-free; the scheduler asks these questions and acts on the answers.
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


def refuse_beams(request: Request, config: ScheduleConfig, memory: KVMemory) -> None:
    """Refuse a search whose beams can never decode together.

    Raises:
        RequestError: with the number of beams and the option that limits them.
    """
    if request.group is None or not request.group.atomic:
        return
    if not memory.placement.shares:
        raise RequestError(
            "beams share pages, and in this store a page has one holder: use --kv-store paged or "
            "leave out use_beam_search",
            param="use_beam_search",
        )
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        if num_rows(request) > getattr(config, name):
            raise RequestError(
                f"{num_rows(request)} beams are more than {name}={getattr(config, name)}: ask for "
                f"fewer or raise --{name.replace('_', '-')}",
                param="beam_width",
            )


def dissolve(request: Request) -> list[Request]:
    """Let the members of a group that cannot run whole run apart, as memory allows.

    Beams cannot: they stay a group.
    """
    sequences, group = together(request), request.group
    if group is None or group.atomic:
        return [request]
    for sequence in sequences:
        sequence.group, sequence.split_from = None, group
    return sequences


def num_rows(request: Request) -> int:
    """Rows a request takes when it enters, those of its group included."""
    return 1 if request.group is None else request.group.num_rows


def reserved_rows(running: Iterable[Request]) -> int:
    """Rows that groups which run have not taken yet and will."""
    groups = {id(r.group): r.group for r in running if r.group is not None}.values()
    missing = (len(group.spare) + sum(not m.is_running for m in group.members) for group in groups)
    return sum(missing)


def together(request: Request) -> list[Request]:
    """The request and all that must give way with it."""
    return [request] if request.group is None else list(request.group.members)


def copies_to_come(requests: Iterable[Request]) -> list[Request]:
    """Members of groups that are, or are about to be, copied from these requests or their kin."""
    groups = {id(r.group): r.group for r in requests if r.group is not None}.values()
    return [planned.child for group in groups for planned in group.forks]


def have_moved_on(request: Request) -> bool:
    """Whether a request and its group have moved on since they last entered, or are new."""
    return all(
        member.progress.num_admissions <= 1
        or (member.is_running and member.num_tokens > member.progress.admitted_tokens)
        for member in together(request)
    )


def same_group(one: Request, other: Request) -> bool:
    """Whether two requests answer one prompt, so that neither makes room for the other."""
    return one.group is not None and one.group is other.group


# ---- reading -----------------------------------------------------------------------------------


def plan_prefill(request: Request) -> Request:
    """Decide who is read and who is copied; return the member to begin with.

    Two members that differ share what both hold before the first eviction that they do not have in
    common: what leaves then, and how chunks fall behind it, is each one's own.

    Args:
        request: any member, or a request alone, which is its own answer.
    """
    group = request.group
    if group is None:
        return request
    ordered = sorted(group.members, key=lambda member: member.output_token_ids)
    origin: dict[int, PlannedFork] = {}
    for parent, child in pairwise(ordered):
        tokens = _common_tokens(parent, child)
        if tokens < child.num_tokens:
            tokens = min(tokens, _alike_tokens(parent, child))
        while id(parent) in origin and origin[id(parent)].tokens >= tokens:
            parent = origin[id(parent)].parent  # it begins where that one is by then
        origin[id(child)] = PlannedFork(child, parent, tokens)
    group.forks = list(origin.values())
    return ordered[0]


def _common_tokens(one: Request, other: Request) -> int:
    pairs = zip(one.output_token_ids, other.output_token_ids, strict=False)
    equal = takewhile(lambda pair: pair[0] == pair[1], pairs)
    return len(one.prompt_token_ids) + sum(1 for _ in equal)


def _alike_tokens(one: Request, other: Request) -> int:
    """Tokens up to which the same has left two members: evictions from before they were forked."""
    pairs = zip(one.eviction.trace, other.eviction.trace, strict=False)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] is pair[1], pairs))
    if not same:
        return min(one.exact_tokens, other.exact_tokens)
    own = [entry.num_computed for r in (one, other) for entry in r.eviction.trace[same : same + 1]]
    last = one.eviction.trace[same - 1].num_computed + 1  # read behind the eviction
    return max(last, min(own, default=UNLIMITED if one.eviction.spec.when == PRESSURE else last))


def readable_tokens(request: Request) -> int:
    """Tokens a request may read in one chunk: up to the next fork.

    A beam leaves its last token to the step in which all of them decode.
    """
    group, tokens = request.group, request.num_uncomputed
    if group is None:
        return tokens
    if group.atomic and len(group.members) > 1:
        tokens -= 1
    stops = (f.tokens - request.progress.num_computed for f in group.forks if f.parent is request)
    return min(tokens, min(stops, default=tokens))


def whole_groups(decoding: list[Request]) -> list[Request]:
    """Leave out members of atomic groups of which somebody is missing."""
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


# ---- forks -------------------------------------------------------------------------------------


def due_forks(request: Request) -> list[PlannedFork]:
    """Take the forks out of the plan for which a request has read enough."""
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
    """Members that none of the members to be continues; see `branch`."""
    return [member for i, member in enumerate(group.members) if i not in parents]


def branch(
    group: RequestGroup, parents: Sequence[int], copy: Callable[[Request, Request], None]
) -> None:
    """Let member i from now on be what member `parents[i]` was, KV and tokens.

    The first to continue a member keeps its row; the next ones are copies. A member whom nobody
    continues becomes spare: its KV has been freed before.

    Args:
        group: its members run.
        parents: for each of the members to be, which one it continues.
        copy: (parent, child) lets a member without KV begin with all that another has.
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
    """Take a request that has ended out of its group; whether the others must be planned anew.

    They must when a copy was to be made from it.
    """
    group = request.group
    if group is None or request not in group.members:
        return False
    group.members.remove(request)
    group.forks = [f for f in group.forks if f.child is not request]
    return any(f.parent is request for f in group.forks)


def note_peak(memory: KVMemory, group: RequestGroup) -> None:
    """Remember the most bytes of a group; call before any of its rows lets pages go."""
    held = bytes_of([member for member in group.members if member.memory.row >= 0], memory)
    group.kv_peak_bytes = max(group.kv_peak_bytes, held)


def bytes_of(requests: Sequence[Request], memory: KVMemory) -> int:
    """Bytes that requests which run hold together, pages that several refer to counted once."""
    rows = [request.memory.row for request in requests]
    if memory.placement.shares:
        return distinct_bytes(memory, rows)
    return sum(map(memory.row_bytes, rows))


def distinct_bytes(memory: KVMemory, rows: Sequence[int]) -> int:
    """Bytes of all pages that any of these rows refers to, each counted once."""
    total = 0
    for table in memory.tables.values():
        named = table.pages[np.asarray(rows, dtype=np.int64)]
        total += len(np.unique(named[named >= 0])) * table.group.page_class.page_bytes
    return total


def sequence_id(request_id: str, index: int) -> str:
    """The id of one of the sequences of a request; the first has the request's own."""
    return f"{request_id}#{index}" if index else request_id


def make_sequences(request: Request) -> list[Request]:
    """The sequences that a request asks for, itself the first or the only one.

    Sequence i draws with the request's seed + i, so the first draws what it would draw alone. Only
    the first has its prompt scored. Of a beam search only the first is a member of its group; the
    others have a place kept.
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
    scored = not index or not params.max_tokens  # without tokens to generate it must be asked for
    spec = replace(
        request.spec,
        request_id=sequence_id(request.request_id, index),
        sampling_seed=request.sampling_seed + index,
        arrival=request.spec.arrival + index,
        params=replace(
            params,
            seed=None,  # which would count before `sampling_seed`
            prompt_logprobs=params.prompt_logprobs if scored else None,
            logprobs=0 if params.ranked and params.logprobs is None else params.logprobs,
        ),
    )
    return Request(
        spec,
        memory=replace(request.memory),
        eviction=replace(request.eviction, trace=[]),
        group=request.group,
    )
