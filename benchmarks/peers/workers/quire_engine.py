"""Quire: `options["flags"]` are options as on the command line of `quire generate`."""

import time

import typer

from benchmarks.peers.workers.protocol import Job, Outputs, Result, peak_rss_bytes, serve
from quire.api.llm import LLM
from quire.cli.options import KV, MODEL, SCHEDULE
from quire.cli.settings import Settings, with_settings
from quire.config.generation_request import GenerationRequest
from quire.config.sampling_params import SamplingParams
from quire.layout.codec_names import AS_COMPUTED
from quire.version import __version__


def parse(arguments: list[str]) -> Settings:
    """Parse a model and its options."""
    found: list[Settings] = []
    app = typer.Typer(add_completion=False)

    @app.command()
    @with_settings(MODEL, KV, SCHEDULE)
    def take(*, settings: Settings) -> None:
        """Keep the options."""
        found.append(settings)

    app(arguments, standalone_mode=False)
    return found[0]


def settings_of(job: Job) -> Settings:
    """Options of the job: its KV memory without prefix caching, then its flags."""
    fixed = {
        "--threads": job["threads"],
        "--kv-memory": job["kv_bytes"],
        "--max-num-batched-tokens": job["max_num_batched_tokens"],
        "--chunk-tokens": job["max_num_batched_tokens"],
    }
    words = [str(word) for option in fixed.items() for word in option]
    words += ["--no-enable-prefix-caching", "--no-verify"]
    return parse([job["model"], *words, *job["options"]["flags"]])


def generate(llm: LLM, prompts: list[list[int]], new_tokens: list[int]) -> Outputs:
    """Run prompts to their number of tokens."""
    outputs = Outputs(len(prompts))
    indices = {}
    for i, (prompt, new) in enumerate(zip(prompts, new_tokens, strict=True)):
        options = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
        indices[llm.engine.submit(GenerationRequest(prompt, options))] = i
    while llm.engine.has_work:
        for delta in llm.engine.step():
            outputs.add(indices[delta.request_id], list(delta.token_ids))
    return outputs


def run(job: Job) -> Result:
    """Run all prompts at once."""
    started_s = time.perf_counter()
    settings = settings_of(job)
    llm = settings.open_llm()
    warm = job["warmup_prompts"]
    generate(llm, warm, [job["warmup_tokens"]] * len(warm))
    load_s = time.perf_counter() - started_s
    outputs = generate(llm, job["prompts"], job["new_tokens"])
    total_s = outputs.elapsed_s()
    stats = llm.stats()
    return Result(
        version=__version__,
        weights_type=weights_type(llm, settings),
        weight_bytes=llm.model.weight_bytes,
        kv_type=dtype_name(llm) if settings.kv.codec == AS_COMPUTED else settings.kv.codec,
        kv_bytes=job["kv_bytes"],
        load_s=load_s,
        total_s=total_s,
        times_s=outputs.times_s,
        tokens=outputs.tokens,
        peak_rss_bytes=peak_rss_bytes(),
        figures={"kv_peak_bytes": stats.kv_peak_bytes, "preemptions": stats.num_preemptions},
    )


def weights_type(llm: LLM, settings: Settings) -> str:
    """Codec of the weights, or their dtype."""
    codec = getattr(settings.loading, "weight_codec", "auto")
    return codec if codec != "auto" else dtype_name(llm)


def dtype_name(llm: LLM) -> str:
    """Name of the model's dtype."""
    return str(llm.model.decoder.dtype).removeprefix("torch.")


if __name__ == "__main__":
    serve(None, run)
