"""Outputs of an engine: statistics, ledger, events, block events, eviction traces."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from golden.cases import case
from golden.workshop import Workshop, finish, greedy
from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig
from quire.config.sampling_params import SamplingParams
from quire.engine.block_events import MEDIA, BlockEvents, as_arrays
from quire.engine.core import Engine
from quire.plan.rates import PrefillRates
from quire.scheduler.events import KINDS, KVEvent
from quire.sim.machine import MachineConfig
from quire.sim.models import model_shape
from quire.sim.run import SimConfig, make_simulator
from quire.sim.traces.base import TraceOptions
from quire.sim.traces.loading import load_trace

PROMPT = [5, 9, 2, 7] * 10
STEPS = 8  # of a crowd until one of it has left
MAX_TRIES = 200
SMALL_PAGES = {"page_tokens": 4}
TENANTS = {"tenants": "red:guaranteed=256KiB; default"}


@dataclass
class Watched:
    """Outputs of an engine: during its work, at the end, and as events.

    Attributes:
        stats, ledger: during its work.
        stats_at_end, ledger_at_end: when it was idle.
    """

    stats: dict[str, object]
    ledger: dict[str, object]
    events: list[KVEvent]  # all of them
    stats_at_end: dict[str, object] = field(default_factory=dict)
    ledger_at_end: dict[str, object] = field(default_factory=dict)


def crowd(workshop: Workshop, *, preempt: str = "auto", **options: object) -> Watched:
    """A KV memory for three prompts, but at the end for about 1.5 of the requests."""
    kv = SMALL_PAGES | {"memory": "448KiB", "swap_space": 0} | options
    schedule = {"preempt": preempt, "admission": "optimistic"} | TENANTS
    engine = workshop.engine(schedule=schedule, **kv)
    events: list[KVEvent] = []
    engine.events.subscribe(events.append)
    for number, prompt in enumerate([[3 + i, 11, 4, 8] * 3 for i in range(3)]):
        tenant = "red" if number == 1 else "default"
        engine.submit(GenerationRequest(prompt, greedy(16), request_id=f"r{number}", tenant=tenant))
    engine.submit(
        GenerationRequest(PROMPT[:23], SamplingParams(n=2, seed=1, max_tokens=2), request_id="two")
    )
    for _ in range(STEPS):
        engine.step()
    found = Watched(engine.stats().as_dict(), engine.ledger(), events)
    finish(engine)
    found.stats_at_end, found.ledger_at_end = engine.stats().as_dict(), engine.ledger()
    return found


def swapped(workshop: Workshop) -> Watched:
    return crowd(workshop, swap_space="4MiB", preempt="swap")


def offloaded(workshop: Workshop) -> Watched:
    return crowd(workshop, offload_memory="4MiB", offload_recompute="off")


class _SlowPrefill:
    """Costs with which every stored prefix is loaded; observations are ignored."""

    prefill = PrefillRates(token_s=1e3)
    coefficients = (0.0, 0.0)

    @property
    def costs(self) -> "_SlowPrefill":
        return self

    def read(self, *_: object) -> None:
        pass

    add = read


def with_disk(workshop: Workshop, folder: Path, **options: object) -> Engine:
    kv = SMALL_PAGES | {"disk_memory": "16MiB", "disk_path": str(folder)} | options
    engine = workshop.engine(**kv)
    prefix_loader = engine.prefix_loader
    prefix_loader.costs = prefix_loader.tier.levels.rates[0] = _SlowPrefill()
    engine.submit(GenerationRequest(PROMPT, greedy(2)))
    return engine


def restored(workshop: Workshop) -> Watched:
    """An engine that loads prefixes of a closed engine from disk, and stores more."""
    folder = workshop.folder_for("restored") / "kv"
    first = with_disk(workshop, folder)
    finish(first)
    first.close()
    engine = with_disk(workshop, folder, memory="448KiB")
    events: list[KVEvent] = []
    engine.events.subscribe(events.append)
    finish(engine)
    found = Watched(engine.stats().as_dict(), engine.ledger(), events)
    for number in range(MAX_TRIES):  # a thread stores evicted blocks: a later step emits the event
        if any(event.kind == "prefix_stored" for event in events):
            break
        engine.submit(GenerationRequest([number % 100 + 5] * 40, greedy(2)))
        finish(engine)
    engine.close()
    return found


@case(loose=("tier.stored_*", "tier.loaded_tokens", "ended.num_steps", "*.weight_bytes"))
def engine_stats(workshop: Workshop) -> object:
    found = workshop.once(swapped)
    return {
        "running": found.stats,
        "ended": found.stats_at_end,
        "with_pages_on_host": {
            "offloaded_bytes": workshop.once(offloaded).stats["offloaded_bytes"]
        },
        "tier": workshop.once(restored).stats["tier"],
    }


@case(loose=("*.peak_bytes",))
def ledger(workshop: Workshop) -> object:
    found = workshop.once(swapped)
    host = workshop.once(offloaded).ledger["host"]
    return {"running": found.ledger, "ended": found.ledger_at_end, "with_pages_on_host": host}


# ---- events ------------------------------------------------------------------------------------


def by_kind(events: Iterable[KVEvent]) -> dict[str, list[Mapping[str, object]]]:
    found: dict[str, list[Mapping[str, object]]] = {}
    for event in events:
        found.setdefault(event.kind, []).append(event.as_dict())
    return found


@case(loose=("*_bytes", "*tokens", "*.blocks", "*.length"))
def events(workshop: Workshop) -> object:
    found = [
        event for make in (swapped, offloaded, restored) for event in workshop.once(make).events
    ]
    found += crowd(workshop, preempt="recompute").events
    for engine in _others(workshop):
        found += engine.events.newest()
    kinds = by_kind(found)
    assert not set(KINDS).difference(kinds), "kinds of events that no engine here emits"
    return kinds


def _others(workshop: Workshop) -> Iterable[Engine]:
    """An engine that evicts, and one whose request was cancelled."""
    evicting = workshop.engine(**SMALL_PAGES, evict="recent:cap=16,every=8", record_evictions=True)
    evicting.submit(GenerationRequest(PROMPT, greedy(2)))
    finish(evicting)
    yield evicting
    cancelled = workshop.engine(**SMALL_PAGES)
    request_id = cancelled.submit(GenerationRequest(PROMPT, greedy(4)))
    cancelled.step()
    cancelled.cancel(request_id)
    yield cancelled


@case(loose=("*_bytes", "*tokens", "*.blocks", "*.length"))
def events_of_simulation(workshop: Workshop) -> object:
    trace = workshop.folder / "simulated.jsonl"
    line = '{{"timestamp": {}, "input_length": 600, "output_length": 60, "hash_ids": [1, {}]}}\n'
    trace.write_text("".join(line.format(i, i + 2) for i in range(6)), encoding="utf-8")
    kv = KVConfig(memory="4MiB", swap_space="2MiB")
    rates = MachineConfig().rates()
    config = SimConfig(model=model_shape("quire-tiny"), rates=rates, kv=kv)
    simulator = make_simulator(load_trace(trace, TraceOptions()), config)
    found: list[KVEvent] = []
    simulator.engine.scheduler.sequence_memory.events.subscribe(found.append)
    simulator.run()
    return by_kind(found)


@case(exact=("*.name", "*.block_size"))
def block_events(workshop: Workshop) -> object:
    """Fields by name in Python, by index on the wire."""
    batches: list[Mapping[str, object]] = []
    listener = BlockEvents(batches.append, MEDIA["cpu"], clock=lambda: 1.5)
    listener.cleared()
    engine = workshop.engine(**SMALL_PAGES, memory="512KiB")
    engine.prefix_events.subscribe(listener)
    for prompt in (PROMPT[:24], *([i, 11, 4, 8] * 10 for i in range(3))):
        engine.submit(GenerationRequest(prompt, greedy(4)))
    finish(engine)
    kinds = {batch["events"][0]["type"]: batch for batch in reversed(batches)}
    return {
        name: {"batch": batch, "on_the_wire": _by_place(as_arrays(batch))}
        for name, batch in kinds.items()
    }


def _by_place(arrays: list[object]) -> dict[str, object]:
    stamp, [event] = arrays
    return {"0": stamp, "1[0]": {str(place): value for place, value in enumerate(event)}}


@case(loose=("mixed_precision.retained", "mixed_precision.promoted"))
def eviction_trace(workshop: Workshop) -> object:
    plain = {"evict": "streaming:cap=16,every=8"}
    mixed = {"evict": "h2o:cap=16,every=8", "codec": "int2+residual=8+promoted=8:int8"}
    return {"plain": _trace(workshop, **plain), "mixed_precision": _trace(workshop, **mixed)}


def _trace(workshop: Workshop, **options: object) -> object:
    engine = workshop.engine(**options, record_evictions=True)
    request_id = engine.submit(GenerationRequest(PROMPT[:24], greedy(4)))
    finish(engine)
    return [kept.as_dict() for kept in engine.eviction_trace(request_id)]
