"""Pages that admission counts for a request of any layout are those that it uses while it runs."""

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from quire.errors import ConfigError, NeverFits
from quire.kv.memory import KVMemory
from quire.layout.codec_names import codec_spec
from quire.layout.eviction import (
    DECODE,
    KEEP_ALL,
    PREFILL_AND_DECODE,
    PREFILL_END,
    PRESSURE,
    UNLIMITED,
)
from quire.layout.layout import layout_for, statistics_used
from quire.layout.model import LayerSpec
from quire.layout.pages import CacheLayout, LaneGroup, PageClass, PlaneSpec
from quire.layout.statistics import AttentionMax, ScoringPass
from quire.scheduler.peaks import need_of
from quire.scheduler.request import num_rows
from support.model_specs import small_spec
from support.scheduler_load import RING, SUMS, EvictionSpec, SchedulerLoad, Setting

AMPLE_BYTES = 1 << 24
PLAIN = ("float32", "int8", "int8+sinks=2+residual=8")
PAGE_CODECS = ("int4_page/int4", "int4_page/int4+sinks=2+residual=12")


class AnyLayout(SchedulerLoad):
    """A load without the check of refusals, which assumes few page classes."""

    def _check_refusal(self, request):
        pass


@dataclass(frozen=True, kw_only=True)
class Case:
    """One request and the engine that runs it.

    Attributes:
        windows: sliding windows of the model's layers.
        width: number of output sequences.
        beams: whether the outputs are beams.
        offload: whether the first pages of a sequence may be offloaded.
        state: whether two more layers have a recurrent state, a kind that exists only in tests.
        rivals: prompt tokens, `max_tokens` and priority of requests that do not evict tokens.
        pressed: steps before which tokens are evicted under pressure.
        preempted: steps before which the last running request is preempted.
    """

    codec: str = "float32"
    windows: tuple[int | None, ...] = (None,)
    page_tokens: int = 4
    eviction: EvictionSpec = KEEP_ALL
    width: int = 1
    beams: bool = False
    offload: bool = False
    state: bool = False
    chunk_tokens: int = 64
    prompt: int = 34
    max_tokens: int = 2
    rivals: tuple[tuple[int, int, int], ...] = ()
    pressed: tuple[int, ...] = ()
    preempted: tuple[int, ...] = ()

    def memory(self, total_bytes: int) -> KVMemory:
        layers = tuple(LayerSpec(window=window) for window in self.windows)
        evicts = self.eviction.cap is not None
        layout = layout_for(
            replace(MODEL, num_layers=len(layers), layers=layers),
            codec=f"{self.codec}+plain=float32" if self.codec != "float32" else self.codec,
            page_tokens=self.page_tokens,
            evicting=evicts,
            heads_apart=evicts,
            statistics=self.eviction.statistics,
        )
        if self.state:
            layout = CacheLayout((*layout.groups, STATE))
        return KVMemory(layout, total_bytes, self.width + len(self.rivals))

    def load(self, total_bytes: int) -> SchedulerLoad:
        """Make a scheduler over a memory of this size, with the request in its queue.

        Raises:
            ConfigError, NeverFits: the memory is too small.
        """
        setting = Setting(
            cap=None if self.eviction.cap is None else 20,  # used by no request
            max_num_seqs=max(2, self.width + len(self.rivals)),
            max_num_batched_tokens=256,
            chunk_tokens=self.chunk_tokens,
            offload_bytes=total_bytes if self.offload else 0,
        )
        load = AnyLayout(setting, self.memory(total_bytes))
        members = [load.request(self.prompt, self.max_tokens) for _ in range(self.width)]
        rivals = [load.request(*rival) for rival in self.rivals]
        names = statistics_used(load.memory.layout, self.eviction.statistics)
        for member in members:
            member.eviction.spec, member.memory.statistics = self.eviction, names
            member.eviction.pending = self.eviction.from_prompt
        for rival in rivals:
            rival.eviction.spec, rival.memory.statistics = KEEP_ALL, ()
        if self.width > 1:
            load.submit_group(members, atomic=self.beams)
        else:
            load.submit(members[0])
        if not load.requests:
            raise NeverFits("see above")
        for rival in rivals:
            load.submit(rival)
        return load

    def run(self, load: SchedulerLoad) -> None:
        scheduler = load.scheduler
        for step in range(max(*self.pressed, *self.preempted, -1, -1) + 1):
            if step in self.pressed:
                scheduler.capacities.free_for(scheduler.running, scheduler.running)
            if step in self.preempted:
                scheduler.preempt_one()
            if scheduler.has_work:
                load.step()
        load.drain()


MODEL = small_spec(None)
STATE = LaneGroup(
    name="state",
    page_class=PageClass(planes=(PlaneSpec("state", codec_spec("float32"), 9, 3),), tokens=1),
    layers=(50, 51),
    records=1,
)

SCORED = AttentionMax(of=ScoringPass("again", "", "", "", chunk_tokens=8, overlap=2))
WINDOWS = [(None,), (None, 8), (None, 3, 12), (None,) * 6, (None, 8) * 5]
RIVALS = st.tuples(st.integers(1, 50), st.integers(1, 20), st.integers(-1, 1))
SCHEDULES = (PREFILL_AND_DECODE, PREFILL_END, DECODE, PRESSURE)


@st.composite
def drawn_options(draw, schedules=SCHEDULES) -> dict:
    """Draw the options of a case, each from the values that the earlier ones leave valid.

    The test makes the case: the type checks of its fields may not run in a strategy.
    """
    codec = draw(st.sampled_from(PLAIN + PAGE_CODECS))
    windows = draw(st.sampled_from(WINDOWS))
    width = draw(st.sampled_from([1, 1, 2, 3]))
    beams = width > 1 and draw(st.booleans())
    evicts = codec not in PAGE_CODECS and draw(st.booleans())  # slots of page codecs do not move
    may_offload = len(windows) > 5  # more layers than staging slots
    eviction = None
    if evicts:
        every, when = draw(st.integers(1, 6)), draw(st.sampled_from(schedules))
        eviction = {
            "cap": every + draw(st.integers(1, 30)),
            "every": every,
            "when": when,
            "from_prompt": when in (PREFILL_END, DECODE) and draw(st.booleans()),
            "statistics": draw(st.sampled_from([(), (SUMS,), (SUMS, RING)])),
        }
    if eviction is not None and codec == "float32" and draw(st.integers(0, 3)) == 0:
        # a pass after the prompt; refused with states, offload and tokens in full precision
        scored = {"when": PREFILL_END, "statistics": (SCORED,)}
        eviction, may_offload = eviction | scored, False
    return {
        "codec": codec,
        "windows": windows,
        "page_tokens": draw(st.sampled_from([2, 4, 16])),
        "eviction": eviction,
        "width": width,
        "beams": beams,
        "offload": may_offload and draw(st.booleans()),
        "state": not (eviction and SCORED in eviction["statistics"]) and draw(st.booleans()),
        "chunk_tokens": draw(st.sampled_from([1, 5, 16, 64])),
        "prompt": draw(st.integers(1, 50)),
        "max_tokens": draw(st.integers(1, 20)),
        "rivals": tuple(draw(st.lists(RIVALS, max_size=3))),
        "pressed": tuple(draw(st.lists(st.integers(0, 40), max_size=4))),
        "preempted": tuple(draw(st.lists(st.integers(0, 40), max_size=4))),
    }


def case_of(options) -> Case:
    eviction = options["eviction"]
    rule = KEEP_ALL if eviction is None else EvictionSpec(**eviction)
    if rule.from_prompt:  # until it is divided, every lane may get the most
        num_lanes = MODEL.num_kv_heads * options["windows"].count(None)
        rule = replace(rule, lane_capacities=(UNLIMITED,) * num_lanes)
    return Case(**{**options, "eviction": rule})


def load_in_min_memory(request: Case) -> SchedulerLoad:
    """A scheduler over the least memory (within 5 %) that accepts the request."""
    sizes = [request.memory(AMPLE_BYTES).layout.smallest_sequence_bytes]
    while sizes[-1] < AMPLE_BYTES:
        sizes.append(sizes[-1] + sizes[-1] // 20 + 1)

    def is_accepted(total_bytes: int) -> bool:
        try:
            return bool(request.load(total_bytes))
        except (ConfigError, NeverFits):
            return False

    return request.load(sizes[bisect_left(sizes, True, key=is_accepted)])


@pytest.mark.parametrize("width", [2, 3])
def test_beams_fit_while_window_lanes_still_hold_the_prompt(width):
    """The prompt is prefilled in one chunk: window lanes hold all of it until the next token."""
    beams = Case(codec="int4_page/int4", windows=(None, 8), width=width, beams=True)

    load_in_min_memory(beams).drain()


def found(codec, windows, page_tokens, eviction, prompt, max_tokens) -> dict:
    case = {"codec": codec, "windows": windows, "page_tokens": page_tokens, "eviction": eviction}
    return case | {"prompt": prompt, "max_tokens": max_tokens}


def rule(cap, every, when, **options) -> dict:
    return {"cap": cap, "every": every, "when": when} | options


SIX, MIXED, STATISTICS = (None,) * 6, (None, 8) * 5, {"statistics": (SUMS, RING)}
FOUND = {
    "repeated evictions do not fit": {"offload": True, "chunk_tokens": 16, "preempted": (14,)}
    | found("float32", MIXED, 16, rule(2, 1, PRESSURE), 21, 14),
    "lanes grow after their plan": {"rivals": ((15, 8, -1), (6, 20, 0), (27, 18, -1))}
    | {"width": 2, "beams": True, "offload": True, "state": True, "chunk_tokens": 64}
    | found("float32", MIXED, 2, rule(27, 3, PREFILL_END, from_prompt=True), 38, 17),
    "beams are cut after their forks": {"width": 4, "beams": True}
    | found("float32", (None, None), 4, rule(25, 4, PREFILL_END, from_prompt=True), 48, 12),
    "pages in scattered slabs": {"chunk_tokens": 16}
    | found("int8+sinks=2+residual=8", MIXED, 2, rule(2, 1, PREFILL_END), 17, 1),
    "beams fork a prompt with evictions": {"rivals": ((36, 2, 1), (59, 11, 1))}
    | {"width": 4, "beams": True, "chunk_tokens": 16, "pressed": (5, 9, 8)}
    | found("float32", SIX, 4, rule(27, 1, PRESSURE), 33, 4),
    "beams replay evictions of their prompt": {"rivals": ((22, 7, -1), (42, 3, 1))}
    | {"width": 4, "beams": True, "chunk_tokens": 1, "pressed": (5, 11)}
    | {"preempted": (51, 16, 10)}
    | found("float32", (None,), 4, rule(9, 2, PRESSURE, **STATISTICS), 12, 5),
    "beams branch before pages are offloaded": {"width": 2, "beams": True}
    | {"offload": True, "chunk_tokens": 5}
    | found("int4_page/int4+sinks=2+residual=12", SIX, 2, None, 25, 2),
}
BY_LAYER = found("float32", SIX, 4, rule(9, 1, PREFILL_END, **STATISTICS), 45, 6)
BY_LAYER["chunk_tokens"] = 16


def with_found_cases(test):
    for options in FOUND.values():
        test = example(options=options)(test)
    return test


@given(options=drawn_options())
@with_found_cases
def test_request_completes_in_the_min_memory_that_admits_it(options):
    request = case_of(options)

    request.run(load_in_min_memory(request))


@given(options=drawn_options(schedules=SCHEDULES[:3]))
@example(options=BY_LAYER)
def test_counted_pages_are_those_that_the_allocator_takes(options):
    """Never fewer, and for one sequence without windows at most one page of each lane more.

    Unless the prompt decides the caps of lanes: until then, each may retain all its tokens.
    With ample memory, no token is evicted under pressure and no page is offloaded. The chunks of a
    prompt, which window lanes depend on, can be smaller than those that are counted.
    """
    request = case_of(options)
    load = replace(request, offload=False, rivals=()).load(AMPLE_BYTES)
    peaks, first = load.scheduler.peaks, next(iter(load.requests.values()))
    width = num_rows(first) if first.group is not None else request.width
    need = need_of(first, first.final_tokens)
    counted = peaks.by_class(peaks.whole_counts(need, num_rows(first)))
    num_groups = width // num_rows(first)  # sequences that run separately

    taken, note_peaks = dict.fromkeys(counted, 0), load.memory.note_peaks

    def noted(rows):  # called after each growth, also of one layer
        note_peaks(rows)
        for page_class, pool in load.memory.pools.items():
            taken[page_class] = max(taken[page_class], pool.num_used)

    load.memory.note_peaks = noted
    load.drain()

    assert all(taken[each] <= counted[each] * num_groups for each in counted)
    decided = not request.eviction.from_prompt
    if decided and width == 1 and request.windows.count(None) == len(request.windows):
        lanes = Counter()
        for group in load.memory.layout.groups:
            lanes[group.page_class] += group.num_lanes
        assert all(counted[each] - taken[each] <= lanes[each] for each in counted)


@pytest.mark.parametrize("statistics", [(), (SUMS,)])
def test_request_is_admitted_in_twice_its_peak_bytes(statistics):
    """Sixteen lanes, and slabs of 1/64 of the memory."""
    eviction = EvictionSpec(cap=43, every=5, statistics=statistics)
    request = Case(windows=(None,) * 8, eviction=eviction, prompt=45, max_tokens=3)
    ample = request.load(AMPLE_BYTES)
    ample.drain()

    request.load(2 * ample.memory.arena_peak_bytes).drain()
