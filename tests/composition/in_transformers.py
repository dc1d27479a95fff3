"""Runs in Transformers: `QuireCache` in generate and `DynamicBatch`, compared with the engine."""

from dataclasses import replace

import torch

from composition.draft import AMPLE, NEW_TOKENS, PAGE_TOKENS, Draft
from composition.ran import Ran
from fuzz.case import Case, RequestCase
from fuzz.models import constants_of
from fuzz.run import Differs, Outcome, answer_amply
from fuzz.watch import Watched
from quire.config.sampling_params import SamplingParams
from quire.hf import DynamicBatch, QuireCache
from support import zoo
from support.byte_tokenizer import byte_tokenizer


def run_cache(draft: Draft) -> Ran:
    """Generate with a `QuireCache`: the tokens and retained positions of the engine."""
    case = draft.case(AMPLE[0])
    ample = answer_amply(case)
    model = _model(case)
    longest = max(len(r.prompt) for r in case.requests)
    rows = [[0] * (longest - len(r.prompt)) + list(r.prompt) for r in case.requests]
    mask = [[0] * (longest - len(r.prompt)) + [1] * len(r.prompt) for r in case.requests]
    options = {"page_tokens": PAGE_TOKENS, "max_tokens": longest + NEW_TOKENS, "verify": False}
    options |= {"codec": case.kv["codec"], "constants": _constants(case)}
    with QuireCache(model, str(case.kv["evict"]), **options) as cache:
        found = model.generate(
            torch.tensor(rows),
            attention_mask=torch.tensor(mask),
            cache=cache,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
        for row, request in enumerate(case.requests):
            answer = ample.answers[f"r{row}"].choices[0]
            if tuple(found[row, longest:].tolist()) != tuple(answer.token_ids):
                raise Differs(f"r{row}: {found[row, longest:].tolist()}, not {answer.token_ids}")
            _compare_retained(cache, ample, row, len(request.prompt))
    return Ran(case, ample, ample, _compared())


def _compare_retained(cache: QuireCache, ample: Watched, row: int, prompt_tokens: int) -> None:
    trace = ample.engine.eviction_trace(f"r{row}")
    if not trace or "full" not in ample.engine.pool.kv.memory.tables:
        return
    spec = ample.engine.model.spec
    last, end = trace[-1], prompt_tokens + NEW_TOKENS - 1
    group = ample.engine.pool.kv.memory.tables["full"].group
    lanes = [[*lane.tolist(), *range(last.num_computed, end)] for lane in last.retained]
    per_lane = spec.num_kv_heads * len(group.layers) // len(lanes)
    expected = [lane for lane in lanes for _ in range(per_lane)]
    held = [lane for layer in group.layers for lane in cache.retained_positions(row, layer)]
    if held != expected:
        raise Differs(f"r{row}: the cache retains {held}, the engine {expected}")


def run_dynamic(draft: Draft) -> Ran:
    """Run a `DynamicBatch`: the tokens of the engine."""
    case = draft.case(AMPLE[0])
    ample = answer_amply(case)
    batcher = str(draft.schedule.get("batcher", "baton_pd")).partition(":")[0]
    tokenizer = byte_tokenizer() if case.tokenizer else None
    batch = DynamicBatch(_model(case), batch_size=2, batcher=batcher, tokenizer=tokenizer)
    handles = [
        batch.submit(list(request.prompt), sampling=SamplingParams(**_wanted(request, draft)))
        for request in case.requests
    ]
    _drive(batch, handles, case)
    for number, handle in enumerate(handles):
        expected = ample.answers[f"r{number}"].choices[0].token_ids
        if tuple(handle.token_ids) != tuple(expected):
            raise Differs(f"r{number}: {handle.token_ids}, not {expected}")
    if batch.device_meter.used_bytes or batch.host_meter.used_bytes:
        raise Differs("an idle batch holds KV")
    ran = Ran(case, ample, ample, _compared())
    ran.scarce.peaks["waiting"] = max(ran.scarce.peaks["waiting"], len(handles) - 2)
    return ran


def _constants(case: Case) -> str | None:
    return constants_of(case.model, str(case.kv["codec"])) or None


def _wanted(request: RequestCase, draft: Draft) -> dict[str, object]:
    """Sampling options of a request, without the log-probabilities of every run."""
    return {n: v for n, v in request.params.items() if n != "logprobs" or n in draft.params}


def _drive(batch: DynamicBatch, handles: list, case: Case) -> None:
    step = 0
    while batch.has_work:
        if step in case.preempt_steps:
            running = [h for h in handles if h.state.value == "running"]
            if running:
                batch.preempt(running[0])
        batch.step()
        step += 1


def _model(case: Case) -> torch.nn.Module:
    architecture, _, times = case.model.partition("*")
    model = zoo.build(architecture, times=int(times or 1))
    model.generation_config.eos_token_id = None
    return model


def _compared() -> Outcome:
    return replace(Outcome(seed=0), compared=1)
