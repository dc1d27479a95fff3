"""All metrics: name, type, labels, meaning, and the name of the same metric in vLLM.

Buckets are those of vLLM, so that quantiles of both engines can be compared.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["gauge", "counter", "histogram", "info"]

PREFIX, VLLM_PREFIX = "quire_", "vllm:"

FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
OUTPUTS = (1, 2, 5, 10, 20)
PREEMPTIONS = (0, 1, 2, 3, 4, 5, 10, 20)
LARGEST_TOKENS = 1_000_000
HTTP_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


def _one_two_five(largest: int) -> Iterator[int]:
    """1, 2, 5, 10, 20, ... up to a number."""
    power = 1
    while power <= largest:
        yield from (power * step for step in (1, 2, 5) if power * step <= largest)
        power *= 10


TOKENS = tuple(_one_two_five(LARGEST_TOKENS))
KV_BYTES = tuple(float(1 << exponent) for exponent in range(14, 40, 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    vllm: str = ""  # without prefix; "": vLLM has no such metric
    buckets: tuple[float | int, ...] = ()  # bounds of a histogram


def _gauge(name: str, text: str, *labels: str, vllm: str = "") -> Metric:
    return Metric(name=name, kind="gauge", help=text, labels=labels, vllm=vllm)


def _counter(name: str, text: str, *labels: str, vllm: str = "") -> Metric:
    return Metric(name=name, kind="counter", help=text, labels=labels, vllm=vllm)


def _histogram(name: str, text: str, buckets: tuple[float | int, ...], vllm: str = "") -> Metric:
    return Metric(name=name, kind="histogram", help=text, buckets=buckets, vllm=vllm)


METRICS: tuple[Metric, ...] = (
    # state
    _gauge("engine_up", "1 while the engine runs, 0 after it has stopped"),
    _gauge("requests_running", "Requests that run", vllm="num_requests_running"),
    _gauge("requests_waiting", "Requests that wait", vllm="num_requests_waiting"),
    _gauge(
        "kv_usage_ratio",
        "Fraction of the KV memory that requests use, 0 to 1",
        vllm="kv_cache_usage_perc",
    ),
    _gauge("kv_memory_bytes", "Size of the KV memory"),
    _gauge(
        "kv_bytes",
        "Bytes of the KV memory by state: requests, cached (prefixes that no request uses), border "
        "(too small for a page), free",
        "state",
    ),
    _gauge("kv_peak_bytes", "Most bytes of the KV memory that requests have used"),
    _gauge("swap_bytes", "KV of preempted requests in CPU memory"),
    _gauge("kv_offloaded_bytes", "KV of running requests in CPU memory"),
    _gauge("activation_bytes", "Activations in CPU memory, from which KV is recomputed"),
    _gauge("weight_bytes", "Weights on the device"),
    _gauge("host_weight_bytes", "Weights of offloaded layers in CPU memory"),
    # counters of the engine
    _counter(
        "prompt_tokens",
        "Prompt tokens of requests with a first token or an embedding",
        vllm="prompt_tokens",
    ),
    _counter("generation_tokens", "Generated tokens", vllm="generation_tokens"),
    _counter("processed_tokens", "Tokens that ran through the model, recomputed ones included"),
    _counter("steps", "Steps of the engine"),
    _counter("async_steps", "Steps launched before the tokens of the last step were read"),
    _counter(
        "async_waits",
        "Steps planned after the tokens of the last step were read, by reason; asynchronous "
        "scheduling only",
        "reason",
    ),
    _counter("async_discarded_rows", "Rows of a launched step whose request had ended"),
    _counter("graph_replays", "Forwards of decode steps that a CUDA graph ran"),
    _counter("graph_captures", "CUDA graphs that were captured"),
    _counter("preemptions", "Preemptions of requests", vllm="num_preemptions"),
    _counter("swaps", "Sequences whose KV was swapped out to CPU memory"),
    _counter("evictions", "Evictions of tokens"),
    _counter("evicted_tokens", "Evicted tokens; of each request the mean over its lanes"),
    _counter(
        "prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache",
        vllm="prefix_cache_queries",
    ),
    _counter(
        "prefix_cache_hits", "Prompt tokens found in the prefix cache", vllm="prefix_cache_hits"
    ),
    _counter("prefix_tier_loaded_tokens", "Prompt tokens loaded from the disk or network tier"),
    _counter(
        "prefix_tier_damaged",
        "Damaged entries and other damaged parts of a tier for cached prefixes (cpu, disk, remote)",
        "tier",
    ),
    _counter("prefix_tier_outages", "How often a tier for cached prefixes failed", "tier"),
    _counter("sparse_pages_read", "Pages of KV heads that sparse attention has read"),
    _counter(
        "sparse_pages_held", "Pages of KV heads that these steps would have read without sparse"
    ),
    _counter("sparse_pages_fetched", "Offloaded pages of KV heads that sparse attention fetched"),
    _counter("sparse_page_hits", "Offloaded pages of KV heads that were still on the device"),
    _counter(
        "spec_decode_drafts",
        "Proposals of speculative decoding that a step has verified",
        vllm="spec_decode_num_drafts",
    ),
    _counter(
        "spec_decode_draft_tokens",
        "Proposed tokens that a step has verified",
        vllm="spec_decode_num_draft_tokens",
    ),
    _counter(
        "spec_decode_accepted_tokens",
        "Proposed tokens that were sampled",
        vllm="spec_decode_num_accepted_tokens",
    ),
    _counter("offload_recomputed_tokens", "Offloaded tokens whose KV was recomputed, per layer"),
    _counter("offload_cpu_attended_tokens", "Offloaded tokens attended to on the CPU, per layer"),
    _counter("weight_transfer_bytes", "Weights transferred to the device"),
    _counter(
        "kv_transfer_bytes",
        "KV transferred, by kind: swapped_out, swapped_in, offloaded",
        "kind",
    ),
    _counter(
        "requests_finished",
        "Finished sequences by reason: stop, length, abort (cancelled), error",
        "finished_reason",
        vllm="request_success",
    ),
    # tenants
    _gauge("tenant_kv_bytes", "KV bytes of the requests of a tenant", "tenant"),
    _gauge("tenant_requests_running", "Running requests of a tenant", "tenant"),
    _gauge("tenant_requests_waiting", "Waiting requests of a tenant", "tenant"),
    _counter("tenant_prompt_tokens", "Prompt tokens computed for a tenant", "tenant"),
    _counter("tenant_generation_tokens", "Tokens generated for a tenant", "tenant"),
    _counter("tenant_preemptions", "Preemptions of requests of a tenant", "tenant"),
    # histograms
    _histogram(
        "time_to_first_token_seconds",
        "Time from the submission of a request to its first token",
        FIRST_TOKEN_S,
        "time_to_first_token_seconds",
    ),
    _histogram(
        "inter_token_latency_seconds",
        "Time between two tokens of a sequence",
        TOKEN_S,
        "inter_token_latency_seconds",
    ),
    _histogram(
        "time_per_output_token_seconds",
        "Mean time between the tokens of a finished sequence",
        TOKEN_S,
        "request_time_per_output_token_seconds",
    ),
    _histogram(
        "request_latency_seconds",
        "Time from the submission of a request to its end",
        REQUEST_S,
        "e2e_request_latency_seconds",
    ),
    _histogram(
        "request_queue_seconds",
        "Time from submission to the first admission",
        REQUEST_S,
        "request_queue_time_seconds",
    ),
    _histogram(
        "request_prefill_seconds",
        "Time from the first admission to the first token",
        REQUEST_S,
        "request_prefill_time_seconds",
    ),
    _histogram(
        "request_decode_seconds",
        "Time from the first token to the end",
        REQUEST_S,
        "request_decode_time_seconds",
    ),
    _histogram(
        "request_inference_seconds",
        "Time from the first admission to the end",
        REQUEST_S,
        "request_inference_time_seconds",
    ),
    _histogram(
        "request_prompt_tokens", "Prompt tokens of a request", TOKENS, "request_prompt_tokens"
    ),
    _histogram(
        "request_generation_tokens",
        "Generated tokens of a sequence",
        TOKENS,
        "request_generation_tokens",
    ),
    _histogram(
        "request_max_tokens", "Field max_tokens of a request", TOKENS, "request_params_max_tokens"
    ),
    _histogram("request_outputs", "Field n of a request", OUTPUTS, "request_params_n"),
    _histogram(
        "request_preemptions",
        "Preemptions of a finished sequence",
        PREEMPTIONS,
        "request_num_preemptions",
    ),
    _histogram(
        "request_evicted_tokens",
        "Evicted tokens of a finished sequence, mean over its lanes",
        (0, *TOKENS),
    ),
    _histogram("request_kv_peak_bytes", "Most KV bytes of a finished sequence", KV_BYTES),
    _histogram("step_tokens", "Tokens generated in a step", STEP_TOKENS, "iteration_tokens_total"),
    # HTTP
    _counter(
        "http_requests", "HTTP requests by method, path and status", "method", "path", "status"
    ),
    _histogram("http_request_seconds", "Time of an HTTP request, with its whole stream", HTTP_S),
    # constants
    Metric(
        name="build_info", kind="info", help="Version of Quire; the value is 1", labels=("version",)
    ),
    Metric(
        name="cache_config_info",
        kind="info",
        help="Options of the KV memory; the value is 1",
        labels=(
            *("block_size", "cache_dtype", "codec", "evict"),
            *("enable_prefix_caching", "kv_memory_bytes", "max_num_seqs"),
        ),
        vllm="cache_config_info",
    ),
)
BY_NAME = {metric.name: metric for metric in METRICS}
