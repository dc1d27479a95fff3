"""KV outside of the arena: preemption, prefix cache and tiers, KV offload, weight offload."""

from composition.draft import ALL, SCARCE
from composition.feature import Feature, both, setting
from composition.ran import Ran

OFTEN = (5, 9, 12, 15)
LATE = {"late_step": (9, 4, 6)}
HYBRID_UNITS = (0.2, 0.35, 0.5, 0.05, 0.75, 0.1)  # of swap space: less than some victim holds
OFFLOADS = setting(
    times=3,
    units=(*SCARCE, 0.96),
    stream_units=8.0,
    default_when="decode",
    vary={"grows": (False, True, ALL)},
)


def _offload(**options: object):
    off = {"offload_recompute": "off", "offload_cpu_attention": "off"}
    return both(OFFLOADS, lambda draft: draft.kv.update(off | dict(draft.kv) | options))


def _preempted(how: str):
    return lambda ran: ran.happened(f"preempted {how}")


def _offloaded(ran: Ran) -> bool:
    return ran.scarce.peaks["offloaded_bytes"] > 0


def _shared_prefix(ran: Ran) -> bool:
    return any(answer.usage.cached_tokens for answer in ran.scarce.answers.values())


def _tier(*names: str):
    caching = {"enable_prefix_caching": True}
    return setting(tiers=names, kv=caching, late=True, vary=LATE)


FEATURES = (
    Feature(
        name="swap",
        group="preemption",
        option="`--preempt swap --swap-space SIZE`",
        draw=setting(schedule={"preempt": "swap"}, host_units=8.0, preempt_steps=OFTEN),
        acted=_preempted("swap"),
        alone_in="preempt",
    ),
    Feature(
        name="recompute",
        group="preemption",
        option="`--preempt recompute`",
        draw=setting(schedule={"preempt": "recompute"}, preempt_steps=OFTEN),
        acted=_preempted("recompute"),
        alone_in="preempt",
    ),
    Feature(
        name="hybrid",
        group="preemption",
        option="`--preempt hybrid`",
        draw=setting(
            schedule={"preempt": "hybrid"},
            preempt_steps=(1, 2, 3, *OFTEN),
            preempt_whole=True,
            # short prompts do not evict: a sequence is not divided after an eviction
            vary={"some_short": (False, True), "host_units": HYBRID_UNITS},
        ),
        acted=_preempted("hybrid"),
        alone_in="preempt",
    ),
    Feature(
        name="prefix cache",
        group="prefix cache",
        option="`--enable-prefix-caching` (default)",
        draw=setting(kv={"enable_prefix_caching": True}, late=True, vary=LATE),
        acted=_shared_prefix,
    ),
    Feature(
        name="prefixes on disk",
        group="prefix cache",
        option="`--disk-kv-memory SIZE --disk-kv-path FOLDER`",
        draw=_tier("disk"),
        acted=lambda ran: ran.happened("prefix_loaded"),
        alone_in="tier",
    ),
    Feature(
        name="prefixes in Redis",
        group="prefix cache",
        option="`--remote-kv redis://HOST:PORT`",
        draw=_tier("remote"),
        acted=lambda ran: ran.happened("prefix_loaded"),
        alone_in="tier",
    ),
    Feature(
        name="KV offload",
        group="offload",
        option="`--kv-offload-memory SIZE`",
        draw=_offload(),
        acted=_offloaded,
    ),
    Feature(
        name="KV recompute",
        group="offload",
        option="`--kv-offload-recompute 0.5`",
        draw=_offload(offload_recompute="0.5"),
        acted=lambda ran: ran.stats.recomputed_tokens > 0,
    ),
    Feature(
        name="CPU attention",
        group="offload",
        option="`--kv-offload-cpu-attention 0.5`",
        draw=_offload(offload_cpu_attention="0.5"),
        acted=lambda ran: ran.stats.cpu_attended_tokens > 0,
    ),
    Feature(
        name="activations in codes",
        group="offload",
        option="`--kv-offload-activation-codec int8`",
        draw=_offload(offload_recompute="0.5", offload_activation_codec="int8"),
        acted=lambda ran: ran.stats.recomputed_tokens > 0,
    ),
    Feature(
        name="weight offload",
        group="offload",
        option="`--weights-memory SIZE`",
        draw=setting(weights="stay=1", times=2),
        acted=lambda ran: ran.stats.offloaded_weight_bytes > 0,
        alone_in="weights",
    ),
    Feature(
        name="throughput objective",
        group="offload",
        option="`--weights-memory SIZE --objective throughput`",
        draw=setting(
            weights="stay=0",
            times=2,
            schedule={"objective": "throughput", "max_num_batched_tokens": 16, "chunk_tokens": 12},
        ),
        acted=lambda ran: ran.stats.offloaded_weight_bytes > 0,
        alone_in="weights",
    ),
    Feature(
        name="weights in int8",
        group="offload",
        option="`--weight-codec int8`",
        draw=setting(weights="int8"),
        acted=lambda ran: ran.scarce.engine.model.weight_codec == "int8",
        alone_in="weights",
    ),
)
