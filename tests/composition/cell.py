"""One cell: features together in one run, which works, is refused, or is a fault."""

import re
import time
import traceback
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from composition.draft import Draft
from composition.features import Feature
from composition.ran import Ran
from fuzz.build import ROOM_FOR_ALL, products, with_tiers
from fuzz.case import Case
from fuzz.models import PLAIN, STAY
from fuzz.run import Outcome, Refused, answer_amply, check_run, require_options, run_scarce
from fuzz.watch import Watched
from quire.errors import ConfigError, NeverFits, RequestError

WORKS, REFUSED, INERT, FAILED = "works", "refused", "inert", "failed"
KEPT_ANSWERS = 100  # runs in ample memory
SEEDS = 4  # prompts, tried where a feature did not act


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What came of a combination.

    Attributes:
        worst: largest difference of logits from those of the same requests in ample memory.
    """

    features: tuple[str, ...]  # names, in the order of the registry
    result: str  # works, refused, inert (a feature did not act) or failed
    why: str = ""  # of a refusal, as the user reads it; of a failure; the features that did not act
    used: str = ""  # values that differ from those of most cells, because a feature acts with them
    worst: float = 0.0
    seconds: float = 0.0  # of the processor

    def as_dict(self) -> dict[str, object]:
        """JSON values."""
        return asdict(self) | {"features": list(self.features)}


def run_cell(features: Sequence[Feature]) -> Cell:
    """Run a combination, with several rules, sizes of memory and prompts until all features act."""
    names, started_s = tuple(f.name for f in features), time.process_time()
    result, why, worst, used = _best_variant(features)
    seconds = round(time.process_time() - started_s, 3)
    return Cell(features=names, result=result, why=why, worst=worst, used=used, seconds=seconds)


def _best_variant(features: Sequence[Feature]) -> tuple[str, str, float, str]:
    """Result of the first variant that works or fails; else of an inert one; else a refusal."""
    first, *others = drafted(features).variants()
    found = [(*_run_variant(first, features), "")]
    for draft in others:
        if found[-1][0] in (WORKS, FAILED):
            break
        found.append((*_run_variant(draft, features), draft.differing(first)))
    if found[-1][0] in (WORKS, FAILED):
        return found[-1]
    inert = [one for one in found if one[0] == INERT]
    return inert[0] if inert else (REFUSED, _commonest([why for _, why, *_ in found]), 0.0, "")


def _commonest(reasons: list[str]) -> str:
    """The first of the reasons that most variants have, whatever rule they name."""
    kinds = [re.sub(r"'[^']*'|\([^)]*\)", "", reason)[:50] for reason in reasons]
    kind, _ = Counter(kinds).most_common(1)[0]
    return reasons[kinds.index(kind)]


def _run_variant(draft: Draft, features: Sequence[Feature]) -> tuple[str, str, float]:
    result, why, worst = INERT, "", 0.0
    seeds = range(SEEDS if len(draft.units) == 1 else 1)
    for case in (draft.case(units, seed) for seed in seeds for units in draft.units):
        result, why, worst = _try(case, draft, features)
        if result != INERT:
            break
    return result, why, worst


def drafted(features: Sequence[Feature]) -> Draft:
    """What the features ask of a run."""
    draft = Draft()
    for feature in features:
        feature.draw(draft)
    return draft


def _try(case: Case, draft: Draft, features: Sequence[Feature]) -> tuple[str, str, float]:
    outcome = Outcome(seed=case.seed)
    try:
        with products(case):
            own = [f.run for f in features if f.run is not None]
            ran = own[0](draft) if own else _run(case, outcome)
            inert = [feature.name for feature in features if not feature.acted(ran)]
    except Refused as error:
        return REFUSED, str(error.__cause__), 0.0
    except NeverFits as error:
        return INERT, f"never fits: {error}", 0.0
    except (ConfigError, RequestError) as error:
        return REFUSED, str(error), 0.0
    except Exception as error:  # noqa: BLE001 - every exception is a finding
        frames = traceback.extract_tb(error.__traceback__)[-5:]
        where = "; ".join(f"{f.filename.rpartition('/')[2]}:{f.lineno} {f.name}" for f in frames)
        return FAILED, f"{type(error).__name__}: {error} [{where}]", outcome.worst
    told = [f.told(ran) for f in features if f.name in inert and f.told is not None]
    if any(told):
        return REFUSED, "; ".join(filter(None, told)), 0.0
    if inert:
        return INERT, ", ".join(inert), outcome.worst
    return WORKS, outcome.near_tie, outcome.worst


def _run(case: Case, outcome: Outcome) -> Ran:
    with with_tiers(case) as case:
        if case.room < ROOM_FOR_ALL:  # else the next engine refuses
            require_options(case)
        ample = _ample(case)
        scarce = run_scarce(case, ample, outcome)
    check_run(case, scarce, ample, outcome)
    return Ran(case, scarce, ample, outcome)


_AMPLE: OrderedDict[str, Watched] = OrderedDict()
_COMPUTED_BY = ("page_tokens", "codec", "evict", "evict_allow", "attention", "sparse")
"""Options of `KVConfig` that decide what an engine in ample memory computes."""


def _ample(case: Case) -> Watched:
    """The answers in ample memory, which many cases share."""
    kv = {name: case.kv[name] for name in _COMPUTED_BY if name in case.kv}
    weights = PLAIN if case.weights.startswith(STAY) else case.weights
    invariant = case.schedule.get("batch_invariant")
    requests = [(r.prompt, r.params, r.evict) for r in case.requests]
    key = repr((case.model, weights, case.exact, case.tokenizer, kv, invariant, requests))
    if key not in _AMPLE:
        _AMPLE[key] = answer_amply(case)
        if len(_AMPLE) > KEPT_ANSWERS:
            _AMPLE.popitem(last=False)
    _AMPLE.move_to_end(key)
    return _AMPLE[key]
