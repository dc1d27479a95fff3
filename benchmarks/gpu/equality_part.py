"""Greedy tokens of an engine on the device, compared with Transformers."""

import torch

from benchmarks.common.models import llama_15m, llama_tiny
from benchmarks.common.result import Cell, PartResult, Table
from benchmarks.gpu.bench import GpuBench
from quire.config.generation_request import GenerationRequest
from quire.config.sampling_params import SamplingParams
from quire.models.loader import LoadedModel

NEAR = 1e-3
"""Logits that differ by less than this may be exchanged by rounding."""


def run_equality(bench: GpuBench) -> PartResult:
    """Run the part.

    equal_outputs: fraction of the outputs that are equal up to a near tie of the two likeliest
    tokens.
    """
    config = bench.config
    shape = llama_15m() if bench.target.on_gpu else llama_tiny()
    rows: list[tuple[Cell, ...]] = []
    for graphs in (None, False):
        model = bench.model_of(shape, dtype=torch.float32)
        prompts = bench.prompts(config.equal_prompts, 40, shape.vocab_size)
        prompts = [prompt[: 5 + 3 * n] for n, prompt in enumerate(prompts)]
        kv_bytes = 4 * bench.kv_bytes(model, len(prompts), 64 + config.equal_tokens)
        engine = bench.engine(model, kv_bytes, len(prompts), cuda_graphs=graphs)
        options = SamplingParams(max_tokens=config.equal_tokens, temperature=0.0, ignore_eos=True)
        ids = [engine.submit(GenerationRequest(prompt, options)) for prompt in prompts]
        tokens: dict[str, list[int]] = {name: [] for name in ids}
        while engine.has_work:
            for delta in engine.step():
                tokens[delta.request_id] += delta.token_ids
        found = [
            agrees(model, prompt, tokens[name]) for prompt, name in zip(prompts, ids, strict=True)
        ]
        stats = engine.stats().graphs
        replayed = 0 if stats is None else stats.replayed
        name = "with graphs where possible" if graphs is None else "without graphs"
        rows.append((name, engine.pool.kv.backend.name, replayed, sum(found), len(found)))
    equal = min(int(row[3] or 0) / int(row[4] or 1) for row in rows)
    return PartResult(
        claims={"equal_outputs": equal},
        tables=(
            Table(
                name="gpu-equality",
                caption=(
                    f"{bench.where} Greedy outputs of {config.equal_tokens} tokens in float32 that "
                    "equal the likeliest tokens of Transformers' eager attention, up to a near tie."
                ),
                columns=("decode steps", "attention", "replayed", "equal", "outputs"),
                rows=tuple(rows),
            ),
        ),
    )


def agrees(model: LoadedModel, prompt: list[int], tokens: list[int]) -> bool:
    """Whether each token is the likeliest after the tokens before it, or nearly so."""
    decoder = model.decoder
    reference = getattr(decoder, "reference_logits")  # noqa: B009 - not part of the protocol
    ids = torch.tensor(prompt + tokens, device=decoder.device)
    logits = reference(ids)[len(prompt) - 1 : -1].float()
    chosen = logits.gather(1, torch.tensor(tokens, device=decoder.device)[:, None])[:, 0]
    return bool((logits.amax(dim=1) - chosen <= NEAR).all())
