"""Speculative decoding of a chat model: speed of kinds of text, and equal outputs.

    python -m benchmarks.guides.speculative smollm2

Every round runs each kind of text without proposals and with each rule, one after the other, in one
engine for each rule; rounds have different prompts. Rates are output tokens per second after the
first token. With `--equal N`, outputs of N prompts in float32 are compared token by token. The last
line of output is one JSON object.
"""

import heapq
import inspect
import json
import statistics
import textwrap
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType

from transformers import PreTrainedTokenizerBase

from quire import LLM, KVConfig, SamplingParams
from quire.cli.report import envelope
from quire.evals.tasks.words import book_text
from quire.scheduler.schedule_config import ScheduleConfig

RULES = ("ngram:tokens=8", "suffix:tokens=16")
USERS = 16
SOURCES: tuple[ModuleType, ...] = (heapq, textwrap, inspect)
TOPICS = ("a lighthouse keeper and the sea", "a clockmaker", "a long journey by train")


@dataclass(frozen=True)
class Run:
    """One run of prompts.

    Attributes:
        token_ids: outputs.
        seconds: from the first token of the first output to the end.
        proposed, accepted: proposed tokens, and those that were right.
        peak_kv_bytes: most KV bytes of each request, summed.
    """

    token_ids: list[list[int]]
    seconds: float
    proposed: int
    accepted: int
    peak_kv_bytes: int


def prompts_of(kind: str, number: int) -> str:
    """The text of a prompt of about 500 tokens, except of `prose`."""
    if kind == "rewrite":
        text = book_text()[3_000 + 2_600 * number :][:1_900]
        return (
            "Rewrite this text and change only the name of the first person to Robert. Repeat "
            f"everything else exactly.\n\n{text}"
        )
    if kind == "code":
        source = inspect.getsource(SOURCES[number % len(SOURCES)])
        start = (4_000 + 1_700 * number) % (len(source) - 1_600)
        code = source[start : start + 1_600]
        return (
            "Rename the first variable of this code to `renamed` and print the whole code again.\n"
            f"```python\n{code}\n```"
        )
    return f"Write a long story about {TOPICS[number % len(TOPICS)]}, number {number}."


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print the result as one line of JSON."""
    parsed = _parse(arguments)
    claims: dict[str, int | float] = {}
    arms: dict[str, object] = {}
    for rule in parsed.rules.split(";"):
        llm = _open(parsed, rule)
        for kind, users in (("rewrite", 1), ("code", 1), ("prose", 1), ("prose", USERS)):
            found = measured(llm, kind, users, parsed)
            name = f"{rule.partition(':')[0]}_{kind}_{users}"
            claims |= {f"{name}_{key}": value for key, value in found.items()}
            print(name, json.dumps(found), flush=True)
        if parsed.equal:
            found = compared(parsed, rule)
            claims |= {f"{rule.partition(':')[0]}_{key}": value for key, value in found.items()}
            print(rule, json.dumps(found), flush=True)
        llm.close()
    print(json.dumps(envelope("speculative", claims, arms, vars(parsed))))


def measured(llm: LLM, kind: str, users: int, parsed: Namespace) -> Mapping[str, int | float]:
    """The rates of a kind of text, without and with proposals in turn."""
    plain, proposed = list[Run](), list[Run]()
    for round_ in range(parsed.rounds):
        texts = [prompts_of(kind, round_ * users + user) for user in range(users)]
        for runs, wanted in ((plain, False), (proposed, None)):
            runs.append(run(llm, texts, parsed.output_tokens, proposes=wanted))
    count = users * parsed.output_tokens
    rates = {
        name: [(count - users) / one.seconds for one in runs]
        for name, runs in (("plain", plain), ("proposed", proposed))
    }
    equal = sum(
        ours == theirs
        for one, other in zip(plain, proposed, strict=True)
        for ours, theirs in zip(one.token_ids, other.token_ids, strict=True)
    )
    tokens = sum(one.proposed for one in proposed)
    return {
        "gain": statistics.median(
            new / old for old, new in zip(rates["plain"], rates["proposed"], strict=True)
        ),
        "tokens_per_s": statistics.median(rates["proposed"]),
        "plain_tokens_per_s": statistics.median(rates["plain"]),
        "accepted_share": sum(one.accepted for one in proposed) / max(1, tokens),
        "proposed_per_output": tokens / (count * parsed.rounds),
        "equal_outputs": equal / (users * parsed.rounds),
        "peak_kv_bytes": max(one.peak_kv_bytes for one in proposed),
        "plain_peak_kv_bytes": max(one.peak_kv_bytes for one in plain),
    }


def run(llm: LLM, texts: Sequence[str], output_tokens: int, *, proposes: bool | None) -> Run:
    """Run prompts together."""
    params = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
    outputs = llm.generate(
        list(encoded(llm.model.require_tokenizer(), texts)), params, speculative=proposes
    )
    usages = [output.usage for output in outputs]
    first_s = min(usage.first_token_s for usage in usages)
    return Run(
        [list(output.token_ids) for output in outputs],
        max(usage.total_s for usage in usages) - first_s,
        sum(usage.draft_tokens for usage in usages),
        sum(usage.accepted_draft_tokens for usage in usages),
        sum(usage.kv_peak_bytes for usage in usages),
    )


def compared(parsed: Namespace, rule: str) -> Mapping[str, int | float]:
    """Outputs of many prompts in float32, without and with proposals.

    Outputs are equal up to near ties: where they part first, the two best tokens differ by less
    than 1e-3 in their log-probability.
    """
    llm = LLM(
        parsed.model,
        dtype="float32",
        kv=KVConfig(memory=parsed.kv_memory),
        schedule=ScheduleConfig(speculative=rule),
    )
    kinds = ("rewrite", "code", "prose", "rewrite")
    texts = [prompts_of(kinds[number % 4], number // 4) for number in range(parsed.equal)]
    params = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True, logprobs=2)
    equal = ties = verified = 0
    for start in range(0, len(texts), USERS):
        ids = list(encoded(llm.model.require_tokenizer(), texts[start : start + USERS]))
        plain = llm.generate(ids, params, speculative=False)
        other = llm.generate(ids, params)
        for ours, theirs in zip(plain, other, strict=True):
            verified += theirs.usage.draft_tokens
            if ours.token_ids == theirs.token_ids:
                equal += 1
                continue
            pairs = zip(ours.token_ids, theirs.token_ids, strict=True)
            place = next(i for i, (one, two) in enumerate(pairs) if one != two)
            assert ours.logprobs is not None, "requested"
            best, second = (value for _, value in ours.logprobs[place].top_logprobs or ())
            ties += best - second < 1e-3
    llm.close()
    return {"compared": len(texts), "equal": equal, "near_ties": ties, "verified_tokens": verified}


def _open(parsed: Namespace, rule: str) -> LLM:
    return LLM(
        parsed.model,
        dtype=parsed.dtype,
        kv=KVConfig(memory=parsed.kv_memory),
        schedule=ScheduleConfig(speculative=rule),
    )


def encoded(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> Iterator[list[int]]:
    """Token ids of texts as messages of a user."""
    for text in texts:
        messages = [{"role": "user", "content": text}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        yield tokenizer.encode(str(prompt), add_special_tokens=False)


def _parse(arguments: Sequence[str] | None) -> Namespace:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--rules", default=";".join(RULES), help="separated by semicolons")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output-tokens", type=int, default=200)
    parser.add_argument("--equal", type=int, default=0, help="prompts whose outputs are compared")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kv-memory", default="1GiB")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
