"""Scheduling: batchers, admission, chunked prefill, limits, tenants, invariance, cancellation."""

from composition.draft import SCARCE
from composition.feature import Feature, setting
from composition.ran import Ran

BATCHERS = {
    "static": "static",
    "pd": "pd:ahead=1,window=8",
    "orca": "orca",
    "baton_pd": "baton_pd:queue=1",
    "baton_pd_best_fit": "baton_pd_best_fit:queue=1",
}
HELD = "baton_pd:queue=2,hold=host,lead=1"
CROSSED = (
    2.1,
    2.6,
    2.69,
    3.0,
    3.4,
    3.8,
    5.0,
    5.7,
    6.5,
)  # units of memory: a limit is crossed in one of them
LONG = {"max_tokens": 40, "min_tokens": 30}  # KV of running requests grows by a third or more
TENANTS = "a:weight=2; b; default"
SERVED = (("a", "b"), ("a", "b", "default"))
"""Tenants of the requests, in turn."""


def _batched(ran: Ran) -> bool:
    """The batcher had to choose: there were more requests than rows."""
    return ran.scarce.peaks["waiting"] > 0 and ran.scarce.kinds["admitted"] > 0


def _waited(ran: Ran) -> bool:
    return ran.scarce.peaks["waiting"] > 0


def _chunked(ran: Ran) -> bool:
    engines = (ran.scarce, *ran.scarce.earlier)
    chunks = sum(engine.kinds["chunk"] + engine.seen.chunks_in_layers for engine in engines)
    return chunks >= 3 * len(ran.case.requests)


def _both_tenants(ran: Ran) -> bool:
    served = {one.tenant for one in ran.stats.served if one.output_tokens}
    return {"a", "b"} <= served


def _kept_below(ran: Ran, limit: str) -> bool:
    """Where memory is reserved at admission, the limit delays admissions instead.

    `scale_down_at` reserves 16 tokens of each request, all that a sliding window retains.
    """
    reserves = ran.case.schedule.get("admission") == "reserved"
    tables = ran.scarce.engine.pool.kv.memory.tables.values()
    reserves = reserves or all(table.group.window is not None for table in tables)
    most = float(str(ran.case.schedule[limit]))
    total_bytes = ran.scarce.engine.pool.kv.memory.total_bytes
    used_bytes = ran.scarce.peaks["used_bytes_of_several"]
    return reserves and _waited(ran) and 0 < used_bytes <= most * total_bytes


FEATURES = (
    *(
        Feature(
            name=name,
            group="batcher",
            option=f"`--batcher {text}`",
            draw=setting(schedule={"batcher": text, "max_num_seqs": 2}),
            acted=_batched,
            alone_in="batcher",
        )
        for name, text in BATCHERS.items()
    ),
    Feature(
        name="baton_pd on the host",
        group="batcher",
        option=f"`--batcher {HELD}`",
        draw=setting(
            schedule={"batcher": HELD, "max_num_seqs": 2},
            host_units=8.0,
            params={"max_tokens": 16},
            vary={
                "schedule.batcher": (HELD, HELD.replace("queue=2", "queue=6")),
                "params.max_tokens": (16, 32),
            },
        ),
        acted=lambda ran: ran.happened("swapped_out"),
        alone_in="batcher",
    ),
    Feature(
        name="reserved admission",
        group="scheduling",
        option="`--admission reserved`",
        draw=setting(schedule={"admission": "reserved"}, units=(1.3, 1.8, 2.5, 3.5, 4.5)),
        acted=_waited,
        alone_in="admission",
    ),
    Feature(
        name="estimated admission",
        group="scheduling",
        option="`--admission estimated`",
        draw=setting(schedule={"admission": "estimated"}, units=(1.3, 1.8, 2.5)),
        acted=_waited,
        alone_in="admission",
    ),
    Feature(
        name="chunked prefill",
        group="scheduling",
        option="`--chunk-tokens 5`",
        draw=setting(schedule={"chunk_tokens": 5, "max_num_batched_tokens": 16}),
        acted=_chunked,
    ),
    Feature(
        name="high watermark",
        group="scheduling",
        option="`--high-watermark 0.6`",
        draw=setting(
            watermark=0.6,
            units=CROSSED,
            params=LONG,
            some_short=True,
            vary={"watermark": (0.6, 0.52, 0.4), "short_tokens": (9, 3)},
        ),
        acted=lambda ran: (
            ran.happened("preempted memory use above the high watermark")
            or _kept_below(ran, "high_watermark")
        ),
    ),
    Feature(
        name="scale_down_at",
        group="scheduling",
        option="`--scale-down-at 0.5 --swap-space SIZE`",
        draw=setting(
            schedule={"scale_down_at": 0.5},
            units=CROSSED,
            host_units=8.0,
            params=LONG,
            some_short=True,
            vary={"schedule.scale_down_at": (0.5, 0.35, 0.42, 0.25), "short_tokens": (9, 3)},
        ),
        acted=lambda ran: (
            ran.happened("preempted memory use above scale_down_at")
            or _kept_below(ran, "scale_down_at")
        ),
    ),
    Feature(
        name="urgent requests",
        group="scheduling",
        option="`--urgent -1`",
        draw=setting(
            schedule={"urgent": -1},
            units=(*SCARCE, 2.6, 3.2),
            urgent=True,
            late=True,
            vary={"late_step": (9, 4, 6, 13)},
        ),
        acted=lambda ran: ran.happened("preempted an urgent request is waiting"),
    ),
    Feature(
        name="tenants",
        group="scheduling",
        option=f"`--tenants '{TENANTS}'`",
        draw=setting(schedule={"tenants": TENANTS}, vary={"tenants": SERVED}),
        acted=_both_tenants,
    ),
    Feature(
        name="batch-invariant",
        group="scheduling",
        option="`--batch-invariant`",
        draw=setting(schedule={"batch_invariant": True}, exact=False),
        acted=lambda ran: ran.outcome.worst == 0.0,
    ),
    Feature(
        name="cancellation",
        group="scheduling",
        option="a request is cancelled while it runs",
        draw=setting(cancels=True),
        acted=lambda ran: any(choice.finish_reason == "abort" for choice in ran.choices),
    ),
    *(
        Feature(
            name=f"{name} attention",
            group="attention",
            option=f"`--attention {name}`",
            draw=setting(kv={"attention": name}),
            acted=lambda ran: True,
            alone_in="attention",
        )
        for name in ("gathered", "reference")
    ),
)
