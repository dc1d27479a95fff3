"""Part `perplexity`: texts processed under a cap, block by block, with real eviction.

Each token is predicted from the KV that its lanes still hold. Once the cap is reached, every policy
evicts `every` tokens and then processes as many. The score covers the tokens after the cap; full KV
is scored on the same tokens.

Source: the table "Eviction Policy Comparison" of "KV Cache: The Hidden Memory Giant" (4,096 tokens,
a budget of 1,024). The source does not describe how to reproduce its numbers; here they are
measured.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from scipy import stats

from benchmarks.common.result import Numbers, PartResult, Table
from benchmarks.eviction.cells import FULL
from benchmarks.eviction.config import PerplexityConfig
from benchmarks.eviction.rules import Rule
from benchmarks.eviction.texts import RunningText, cut_texts
from quire.api.llm import LLM
from quire.config.kv_config import KVConfig, PrefixCacheConfig
from quire.config.sampling_params import SamplingParams
from quire.errors import InvariantError
from quire.layout.eviction import PREFILL_AND_DECODE
from quire.models.loader import LoadedModel
from quire.sampling.outputs import RequestOutput
from quire.scheduler.schedule_config import ScheduleConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleTexts:
    """Scores of all texts with one rule.

    Attributes:
        rule: text of the rule, or FULL.
        nats: mean negative log-likelihood of each text's scored tokens.
        request_bytes: most KV bytes of a text.
    """

    rule: str
    nats: tuple[float, ...]
    request_bytes: int

    @property
    def perplexity(self) -> float:
        """Perplexity over all scored tokens; all texts have equally many."""
        return math.exp(statistics.mean(self.nats))

    def nats_over(self, other: "RuleTexts") -> tuple[float, float]:
        """Mean increase of the nats per token over another rule, and its standard error.

        Returns:
            Increase in nats, and its standard error; 0 for one text.
        """
        increase = [a - b for a, b in zip(self.nats, other.nats, strict=True)]
        error = float(stats.sem(increase)) if len(increase) > 1 else 0.0
        return statistics.mean(increase), error


def run_perplexity(
    model: LoadedModel, config: PerplexityConfig, running: RunningText
) -> PartResult:
    """Run the part."""
    texts = cut_texts(model, running, config.tokens, config.texts)
    found = [score_texts(model, config, texts, rule) for rule in (None, *config.rules)]
    return PartResult(
        claims=claims(found),
        tables=(_table(config, running.name, found),),
        raw={"rules": [asdict(one) for one in found]},
    )


def score_texts(
    model: LoadedModel, config: PerplexityConfig, texts: Sequence[list[int]], rule: Rule | None
) -> RuleTexts:
    """Score all texts with a rule; None: no eviction."""
    number_bytes = model.decoder.dtype.itemsize
    memory = 2 * config.rows * model.spec.kv_bytes(config.tokens, number_bytes) + (8 << 20)
    evict = FULL if rule is None else rule.evict(config.cap, config.every, PREFILL_AND_DECODE)
    kv = KVConfig(memory=memory, evict=evict, prefix_cache=PrefixCacheConfig(enabled=False))
    llm = LLM(model, kv=kv, schedule=ScheduleConfig(max_num_seqs=config.rows))
    options = SamplingParams(max_tokens=0, prompt_logprobs=0)
    answers = llm.generate(list(texts), options)
    return RuleTexts(
        rule=FULL if rule is None else rule.text,
        nats=tuple(mean_nats(answer, config.cap) for answer in answers),
        request_bytes=max(answer.usage.kv_peak_bytes for answer in answers),
    )


def mean_nats(answer: RequestOutput, first: int) -> float:
    """Mean negative log-likelihood of the tokens from position `first` on.

    Raises:
        InvariantError: the request failed.
    """
    if answer.error is not None or answer.prompt_logprobs is None:
        raise InvariantError(f"expected scores of a whole text, got the error {answer.error}")
    scored = [token for token in answer.prompt_logprobs[first:] if token is not None]
    return -statistics.mean(token.logprob for token in scored)


def claims(found: Sequence[RuleTexts]) -> Numbers:
    """Perplexity of every rule, its ratio to full KV's, and the ratio of bytes."""
    full = found[0]
    made: Numbers = {"perplexity_full": full.perplexity}
    for one in found[1:]:
        name = Rule(one.rule).name
        made[f"perplexity_{name}"] = one.perplexity
        made[f"perplexity_{name}_over_full"] = one.perplexity / full.perplexity
        made[f"perplexity_{name}_bytes_over_full"] = one.request_bytes / full.request_bytes
    return made


def _table(config: PerplexityConfig, name: str, found: Sequence[RuleTexts]) -> Table:
    rows = []
    for one in found:
        increase, error = one.nats_over(found[0])
        cap = config.tokens if one.rule == FULL else config.cap
        rows.append(
            (
                one.rule,
                cap,
                one.request_bytes / 1024,
                one.perplexity,
                one.perplexity / found[0].perplexity,
                f"{increase:+.4f} +- {error:.4f}",
            )
        )
    return Table(
        name="eviction-perplexity",
        caption=(
            f"{config.texts} texts of {config.tokens:,} tokens from {name}, processed in blocks of "
            f"{config.every} with a cap of {config.cap} ({100 * config.budget:g} %); tokens after "
            "the cap are scored. KV: most bytes of a text, with statistics. Nats: mean increase "
            "per token over full KV, and its standard error."
        ),
        columns=("rule", "retained tokens", "KV KiB", "perplexity", "over full", "nats more"),
        rows=tuple(rows),
    )
