"""The section about kvpress on the page of a leaderboard: what is comparable, and bytes."""

from collections.abc import Iterator, Mapping, Sequence

from benchmarks.kvpress.run import CHECKED_PROMPTS, PressRun
from benchmarks.kvpress.spec import KVPRESS
from quire.evals.board.grid import NO_CODEC
from quire.evals.board.result import Row
from quire.layout.eviction import PREFILL_END

_SLACK = 0.05
"""Retained bytes may exceed the visible keys by this fraction of full KV in a press that frees."""

SAME_METHOD: Mapping[str, str] = {
    "sinks": "StreamingLLMPress",
    "average": "ObservedAttentionPress",
    "snapkv:window=16": "SnapKVPress:window_size=16",
    "tova": "TOVAPress",
    "keydiff": "KeyDiffPress",
    "lagkv:lag=8": "LagKVPress:lag_size=8",
    "expected_attention": "ExpectedAttentionPress",
}
"""Presses of the same method by the rules of Quire; equal on `prefill_end` but for rounding."""


def frees_memory(row: Row) -> bool:
    """Whether the memory of removed tokens was freed after the prefill; else they were masked."""
    if row.retained_share is None or row.visible is None:
        return False
    return row.retained_share <= row.visible + _SLACK


def press_lines(rows: Sequence[Row], about: PressRun) -> Iterator[str]:
    """The lines of the section.

    Args:
        rows: all rows of the leaderboard.
        about: about the other environment.
    """
    yield "## Presses of kvpress"
    yield ""
    yield from _explanation(about)
    yield ""
    yield "| press | cap | when | quality | KV | retained | visible | frees memory |"
    yield "| --- | ---: | --- | ---: | ---: | ---: | ---: | --- |"
    for row in rows:
        if row.entry.source == KVPRESS:
            yield _row(row)
    yield ""
    yield from _same_method(rows)
    if about.left_out:
        yield "Presses that were not run:"
        yield ""
        for why in dict.fromkeys(about.left_out.values()):
            names = [f"`{name}`" for name, reason in about.left_out.items() if reason == why]
            yield f"* {why}: {', '.join(names)}"
        yield ""


def _explanation(about: PressRun) -> Iterator[str]:
    versions = ", ".join(f"{name} {version}" for name, version in about.versions.items())
    yield (
        f"kvpress's own code ran in another environment ({versions}) on the same token ids, with "
        "the same output lengths and scores. Without a press, all its scores equal those of full "
        f"KV. Each press gave full KV's scores at a compression ratio of 0 on {CHECKED_PROMPTS} "
        "prompts of each task. Comparable are quality, retained tokens and bytes:"
    )
    yield ""
    yield (
        "* **Prompt**: kvpress computes the whole prompt with all tokens and compresses each layer "
        "after its attention, so the first output token is that of full KV. With `prefill_end` of "
        "Quire it is too, but all layers are evicted after the whole prompt, so the peak is that "
        "of full KV. `prefill_and_decode` adds a `DecodingPress` that compresses to the "
        "cap after every token. Quire's schedule of that name also evicts during the prefill, "
        "which bounds the memory of the prompt; the press sees more."
    )
    yield (
        "* **Positions**: retained keys keep their original RoPE positions, and output tokens "
        "follow the prompt's last position. `KeyRerotationPress` re-rotates keys to consecutive "
        "positions."
    )
    yield (
        "* **Bytes**: KV is the mean peak of the memory behind the cache's tensors, read after "
        "every layer, over the same full KV as Quire's rows. It has no page tables and statistics. "
        "*Retained* is that memory after the prefill. *Visible* is the fraction of the prompt's "
        "keys that the next token can read. A press that frees no memory only masks keys, or "
        "holds them in a larger tensor."
    )
    yield (
        "* **Not comparable**: tokens/s, because kvpress runs one prompt at a time in "
        "Transformers; the time of `KVzipPress` and `KVgradPress`, which compute the prompt again "
        "before they compress; and kvpress's published scores, which compress a context without "
        "its question."
    )


def _same_method(rows: Sequence[Row]) -> Iterator[str]:
    """A table of rules and presses of the same method after the prompt; empty without such rows."""
    found = {
        (row.entry.rule, row.entry.budget): row
        for row in rows
        if row.entry.schedule == PREFILL_END and row.entry.codec == NO_CODEC
    }
    pairs = [
        (found[rule, budget], found[press, budget])
        for rule, name in SAME_METHOD.items()
        for press, budget in found
        if press == f"{KVPRESS}/{name}" and (rule, budget) in found
    ]
    if not pairs:
        return
    equal = sum(own.scores == other.scores for own, other in pairs)
    yield (
        f"The same method in both, on `{PREFILL_END}` without a codec: {equal} of {len(pairs)} "
        "pairs have equal scores on every task."
    )
    yield ""
    yield "| rule | press | cap | quality of the rule | quality of the press |"
    yield "| --- | --- | ---: | ---: | ---: |"
    for own, other in pairs:
        name = other.entry.rule.removeprefix(f"{KVPRESS}/")
        yield (
            f"| `{own.entry.rule}` | `{name}` | {own.entry.budget} | {own.quality.mean:.3f} | "
            f"{other.quality.mean:.3f} |"
        )
    yield ""


def _row(row: Row) -> str:
    entry, quality = row.entry, row.quality
    retained, visible = row.retained_share or 0.0, row.visible or 0.0
    return (
        f"| `{entry.rule.removeprefix(f'{KVPRESS}/')}` | {entry.budget} | {entry.schedule} | "
        f"{quality.mean:.3f} ({quality.low:.3f} to {quality.high:.3f}) | {row.kv_share:.3f} | "
        f"{retained:.3f} | {visible:.3f} | {'yes' if frees_memory(row) else 'no'} |"
    )
