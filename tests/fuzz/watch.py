"""Records the logits of every step of an engine and checks its invariants; replays evictions."""

import time
from collections import Counter
from dataclasses import dataclass, field, replace

import torch

from fuzz.build import ample_engine
from fuzz.case import Case
from quire.config.generation_request import GenerationRequest
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.errors import InvariantError, QuireError
from quire.kv.swap import Swapped
from quire.sampling.outputs import OutputBuilder, RequestOutput
from quire.scheduler.eviction_trace import EvictionEntry
from support.pressure import POISON, poison

Context = tuple[tuple[int, ...], tuple[str, ...], int]
"""Tokens, digests of the evictions so far, and RoPE scaling variant: these determine the logits."""

STALLED_STEPS, STALLED_S = 300, 120.0


class Stalled(QuireError):
    """The engine runs steps without progress of a request."""


@dataclass
class SeenLogits:
    """Wrapper of a runner that records the logits of every context.

    Attributes:
        logits: by context, the first time it was computed.
        traces: by context, the evictions so far.
    """

    runner: object
    logits: dict[Context, torch.Tensor] = field(default_factory=dict)
    traces: dict[Context, tuple[EvictionEntry, ...]] = field(default_factory=dict)
    evict: dict[Context, str] = field(default_factory=dict)  # by context, the request's rule
    worst: float = 0.0  # largest difference between two computations of one context
    again: dict[Context, list[torch.Tensor]] = field(default_factory=dict)
    digests: dict[int, tuple[EvictionEntry, str]] = field(default_factory=dict)
    chunks_in_layers: int = 0  # of prompts that were computed layer by layer, each in one step

    def __getattr__(self, name: str) -> object:
        return getattr(self.runner, name)

    def run(self, plan):
        if (by_layer := plan.by_layer) is not None:
            lengths = by_layer.tokens.values()
            self.chunks_in_layers += sum(-(-n // by_layer.chunk_tokens) for n in lengths)
        results = self.runner.run(plan)
        tokens = dict(zip(map(id, plan.requests), plan.tokens, strict=True))
        for result in results:
            end = result.request.progress.num_computed + tokens[id(result.request)]
            self._keep(result.request, end - len(result.logits), result.logits)
        return results

    def _keep(self, request, first: int, rows: torch.Tensor) -> None:
        eviction, variant = request.eviction, request.spec.rope_variant
        entries = tuple(eviction.trace[: eviction.replayed])
        digests = tuple(map(self._digest, entries))
        known = request.token_ids(0, first + len(rows))
        if len(known) < first + len(rows):
            return  # the last token is pending: its context is not known yet
        for i, row in enumerate(rows):
            context = tuple(known[: first + i + 1]), digests, variant
            if context in self.logits:
                found = difference(row, self.logits[context])
                self.worst = max(self.worst, found)
                if found > 0:  # of KV that was recomputed from codes, for example
                    self.again.setdefault(context, []).append(row.clone())
                continue
            self.logits[context], self.traces[context] = row.clone(), entries
            self.evict[context] = request.spec.evict

    def _digest(self, entry: EvictionEntry) -> str:
        if id(entry) not in self.digests:
            self.digests[id(entry)] = entry, entry.digest
        return self.digests[id(entry)][1]


LARGE_LOGIT = 5.0  # logits above it are compared relatively: rounding of products grows with them


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest difference; infinity if one is NaN.

    If a logit is larger than `LARGE_LOGIT`, in units of the largest one over `LARGE_LOGIT`. Those
    of quire-tiny, which is trained, reach 20. With other chunks in ample memory they differ by
    1.2e-4, with exact products by 5e-6 or less.
    """
    found = float((ours - theirs).abs().max())
    found /= max(1.0, float(theirs.abs().max()) / LARGE_LOGIT)
    return found if found == found else float("inf")


@dataclass
class Watched:
    """An engine whose outputs and events are recorded.

    Attributes:
        details: number of events of each kind with a way or a reason, such as "preempted swap".
        peaks: largest number of bytes of offloaded KV, of waiting requests, and of bytes that two
            or more running requests use, after a step.
    """

    engine: Engine
    poisoned: bool = False
    answers: dict[str, RequestOutput] = field(default_factory=dict)  # by request, when it has ended
    kinds: Counter[str] = field(default_factory=Counter)  # number of events of each kind
    details: Counter[str] = field(default_factory=Counter)
    peaks: Counter[str] = field(default_factory=Counter)
    steps: int = 0  # so far
    earlier: tuple["Watched", ...] = ()  # engines that filled the tiers of this one

    def __post_init__(self) -> None:
        self._builders: dict[str, OutputBuilder] = {}
        self.seen = self.engine.runner = SeenLogits(self.engine.runner)
        self.engine.events.subscribe(self._hear)
        self._swapped: dict[int, list[tuple[int, list[bytes]]]] = {}
        if self.engine.scheduler.preempter.swapper is not None:
            self._watch_swaps(self.engine.scheduler.preempter.swapper)
        self._generated, self._since, self._since_s = 0, 0, time.monotonic()

    def _hear(self, event) -> None:
        self.kinds[event.kind] += 1
        for name in ("how", "reason"):
            if name in event.data:
                self.details[f"{event.kind} {event.data[name]}"] += 1

    def _watch_swaps(self, swapper) -> None:
        """Require that sequences have the same bytes after a swap as before."""
        swap_out, swap_in = swapper.swap_out, swapper.swap_in

        def out(requests, choice) -> Swapped | None:
            held = [self._held(request.memory.row) for request in requests]
            swapped = swap_out(requests, choice)
            if swapped is not None:
                self._swapped[id(swapped)] = held
            return swapped

        def back(swapped: Swapped) -> list[int] | None:
            rows = swap_in(swapped)
            expected = self._swapped.pop(id(swapped))
            if rows is not None:
                self.details["swaps compared"] += 1
                if [self._held(row) for row in rows] != expected:
                    raise InvariantError("swapped KV is not the KV before the swap")
            return rows

        swapper.swap_out, swapper.swap_in = out, back

    def _held(self, row: int) -> tuple[int, dict[tuple[str, int], bytes]]:
        """Length and pages of a sequence, by table and lane; offloaded pages are left out.

        Lanes without pages are too: another request may add tables while this one is swapped out.
        """
        memory, store = self.engine.pool.kv.memory, self.engine.pool.kv.store
        found = {}
        for table in memory.tables.values():
            size = table.group.page_class.page_bytes
            paged = store.arena[: len(store.arena) // size * size].view(-1, size)
            for lane, count in enumerate(table.num_pages[row]):
                pages = table.pages[row, lane, int(table.staged[row]) : count]
                if len(pages):
                    bytes_of_lane = paged[torch.from_numpy(pages).long()].cpu().numpy().tobytes()
                    found[table.group.name, lane] = bytes_of_lane
        return int(memory.lengths[row]), found

    def open(self, name: str, prompt: tuple[int, ...]) -> None:
        self._builders[name] = OutputBuilder(name, prompt)

    def step(self) -> None:
        try:
            deltas = self.engine.step()
        finally:
            self.check()
        self.steps += 1
        self._note_peaks()
        for delta in deltas:
            answer = self._builders[delta.request_id].add(delta)
            if answer is not None:
                self.answers[delta.request_id] = answer
        self._require_progress(bool(deltas))

    def _note_peaks(self) -> None:
        offload = self.engine.pool.offload
        found = {"waiting": self.engine.scheduler.num_waiting}
        if len(self.engine.scheduler.running) > 1:
            found["used_bytes_of_several"] = self.engine.pool.kv.memory.used_bytes
        if offload is not None:
            found["offloaded_bytes"] = offload.prefixes.pool.used_bytes
        for name, value in found.items():
            self.peaks[name] = max(self.peaks[name], value)

    def _require_progress(self, moved: bool) -> None:
        generated = self.engine.num_generated_tokens
        if moved or generated != self._generated:
            self._generated, self._since = generated, self.steps
            self._since_s = time.monotonic()
        waited_s = time.monotonic() - self._since_s
        if (self.steps - self._since > STALLED_STEPS and waited_s > 2) or waited_s > STALLED_S:
            raise Stalled(f"no token in {self.steps - self._since} steps, {waited_s:.1f} s")

    def check(self) -> None:
        engine, memory = self.engine, self.engine.pool.kv.memory
        if memory.used_bytes + memory.free_bytes != memory.total_bytes:
            raise InvariantError(f"{memory.used_bytes} + {memory.free_bytes} B are not the arena")
        engine.check()
        if engine.pool.host is not None:
            engine.pool.host.check()
        if engine.pool.offload is not None:
            engine.pool.offload.check()
        if self.poisoned:
            self._poison()

    def _poison(self) -> None:
        memory, store = self.engine.pool.kv.memory, self.engine.pool.kv.store
        plain = not any(group.private for group in memory.layout.groups)
        if plain and self.engine.pool.codec == "float32":
            poison(memory, store)  # also the slots of a page that are not written yet
            return
        in_use = torch.zeros(len(store.arena), dtype=torch.bool)
        for page_class, pool in memory.pools.items():
            size = page_class.page_bytes
            pages = in_use[: len(in_use) // size * size].view(-1, size)
            pages[torch.from_numpy(pool.ref_counts > 0).nonzero().flatten()] = True
        store.arena[~in_use] = POISON

    def require_nothing_held(self) -> None:
        scheduler, memory = self.engine.scheduler, self.engine.pool.kv.memory
        scheduler.sequence_memory.drop_cached()  # cached prefixes may be offloaded
        held = [f"rows {memory.live_rows.tolist()}"] if len(memory.live_rows) else []
        if self.engine.pool.host is not None and self.engine.pool.host.used_bytes:
            held.append(f"{self.engine.pool.host.used_bytes} B of the host pool")
        scheduler.sequence_memory.drop_cached()
        offload = self.engine.pool.offload
        if offload is not None and offload.prefixes.pool.used_bytes:
            held.append(f"{offload.prefixes.pool.used_bytes} B of offloaded KV")
        if memory.cached_references or memory.arena.num_free_slabs != memory.arena.num_slabs:
            held.append(f"{memory.used_bytes} B of the arena")
        if held:
            raise InvariantError(f"an engine without work holds {'; '.join(held)}")


# ---- logits of a run that evicted under pressure, beside those of a replay in ample memory -------

MAX_LEAVES = 24


def worst_against_replay(case: Case, seen: SeenLogits, ample: SeenLogits) -> tuple[float, int]:
    """Largest difference between logits of a run and of replays of its eviction traces."""
    missing = [
        context
        for context in seen.logits
        if context not in ample.logits
        # of other rules, only wrong proposed tokens are missing: they are no part of a prompt
        and "when=pressure" in str(seen.evict[context] or case.kv["evict"])
    ]
    chosen = leaves(seen, missing)[:MAX_LEAVES]
    if not chosen:
        return 0.0, 0
    replayed = replay(case, seen, chosen)
    worst, compared = 0.0, 0
    for context in missing:
        if context in replayed.logits:
            worst = max(worst, difference(seen.logits[context], replayed.logits[context]))
            compared += 1
    lacking = [leaf for leaf in chosen if leaf not in replayed.logits]
    if lacking:
        tokens, digests, _ = lacking[0]
        raise InvariantError(f"a replay of {len(digests)} evictions, {len(tokens)} tokens parts")
    return worst, compared


def leaves(seen: SeenLogits, contexts: list[Context]) -> list[Context]:
    """The contexts whose replays pass through all others."""
    found: list[Context] = []
    for context in sorted(contexts, key=lambda c: (-len(c[0]), c)):
        if not any(_passes(seen, leaf, context) for leaf in found):
            found.append(context)
    return found


def _passes(seen: SeenLogits, leaf: Context, context: Context) -> bool:
    tokens, digests, variant = context
    if leaf[0][: len(tokens)] != tokens or leaf[1][: len(digests)] != digests:
        return False
    later = seen.traces[leaf][len(digests) :]
    return leaf[2] == variant and all(entry.num_computed >= len(tokens) for entry in later)


def replay(case: Case, seen: SeenLogits, contexts: list[Context]) -> SeenLogits:
    """Read texts in ample memory while the recorded tokens leave; the logits of every token."""
    engine = ample_engine(case)
    watched = Watched(engine)
    for number, context in enumerate(contexts):
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, ignore_eos=True)
        name = f"replay {number}"
        engine.submit(
            GenerationRequest(context[0], params, request_id=name, evict=seen.evict[context])
        )
        watched.open(name, context[0])
        for _, request in engine._outputs.unfinished(name):
            request.eviction.trace = list(seen.traces[context])
            request.spec = replace(request.spec, rope_variant=context[2])
    while engine.has_work:
        watched.step()
    return watched.seen
