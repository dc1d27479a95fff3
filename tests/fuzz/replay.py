"""Logits of a run that evicted under pressure, beside those of a replay in ample memory."""

from dataclasses import replace

from fuzz.build import ample_engine
from fuzz.case import Case
from fuzz.watch import Context, SeenLogits, Watched, difference
from quire.config.generation_request import GenerationRequest
from quire.config.sampling_params import SamplingParams
from quire.errors import InvariantError

MAX_LEAVES = 24


def worst_against_replay(case: Case, seen: SeenLogits, ample: SeenLogits) -> tuple[float, int]:
    """Largest difference between logits of a run and of replays of its eviction traces.

    Args:
        case: of the run.
        seen: its logits.
        ample: of the run in ample memory, where nothing was evicted under pressure.

    Returns:
        The difference, and how many contexts were compared with a replay.
    """
    missing = [context for context in seen.logits if context not in ample.logits]
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
