"""Workload of `python -m benchmarks disaggregation`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DisaggregationConfig:
    """Streams that decode while long prompts arrive.

    Attributes:
        model: shape of `benchmarks.common.workload.SHAPES`, or quire-tiny.
        files: folder of the written models.
        store: redis (a server of its own) or file (a temporary folder).
        streams: requests that decode from the start on.
        stream_tokens: tokens that each of them generates.
        prompt_tokens: length of a long prompt.
        prompts: number of long prompts.
        interval_s: time between two long prompts.
        new_tokens: tokens generated after a long prompt.
        kv_memory: KV memory of each engine, a size.
        repeats: measurements of each variant, in turn; the medians are reported.
    """

    model: str = "125m"
    files: str = "build/serve"
    store: str = "redis"
    streams: int = 8
    stream_tokens: int = 320
    prompt_tokens: int = 2048
    prompts: int = 6
    interval_s: float = 2.5
    new_tokens: int = 16
    kv_memory: str = "768MiB"
    repeats: int = 3


QUICK = DisaggregationConfig(
    model="quire-tiny",
    streams=2,
    stream_tokens=40,
    prompt_tokens=256,
    prompts=2,
    interval_s=0.1,
    new_tokens=4,
    kv_memory="32MiB",
    repeats=1,
)
