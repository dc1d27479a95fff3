"""Texts of presses: kvpress's class with options, in the syntax of eviction rules.

    SnapKVPress:window_size=16
    AdaKVPress:press=(SnapKVPress:window_size=16),alpha_safeguard=0.2

Windows and lags of the default presses are those of the leaderboard's own rules: kvpress's defaults
(64 and 128) exceed an eighth of 256 tokens. All other options have kvpress's defaults.
"""

from collections.abc import Iterable, Mapping, Sequence

from quire.errors import ConfigError
from quire.evals.board.grid import NO_CODEC, BoardEntry
from quire.layout.eviction import DECODE, PREFILL_AND_DECODE, PREFILL_END, parse_policy

KVPRESS = "kvpress"
"""Source of the entries."""
_SNAP = "SnapKVPress:window_size=16"

PRESSES = (
    *("KnormPress", "RandomPress:seed=1", "StreamingLLMPress", _SNAP),
    *("PyramidKVPress:window_size=16", "TOVAPress", "ObservedAttentionPress", "KeyDiffPress"),
    *("LagKVPress:lag_size=8", "ExpectedAttentionPress", "CURPress", "LeverageScorePress"),
    *("NonCausalAttnPress", "CompactorPress", "CapPress", "KVzipPress", "KVgradPress"),
    *("KVComposePress", f"AdaKVPress:press=({_SNAP})", f"CriticalKVPress:press=({_SNAP})"),
    *(f"CriticalAdaKVPress:press=({_SNAP})", f"ChunkKVPress:press=({_SNAP})"),
    *(f"EntropyGatedChunkKVPress:press=({_SNAP})", "BlockPress:press=(KeyDiffPress),block_size=32"),
    *("ChunkPress:press=(KeyDiffPress),chunk_length=64", f"MergingPress:press=({_SNAP})"),
    *("KeyRerotationPress:press=(StreamingLLMPress)", "CAMPress:base_press=(TOVAPress)"),
)
"""Presses that run by default: all of kvpress 0.5.5 that set a budget and need no other files."""

SCHEDULES = (PREFILL_AND_DECODE, PREFILL_END, DECODE)
"""Values of `when` that kvpress has: by a prefill press, a decoding press, or both."""

_FILES = "need files that the authors computed for certain models"
_SCHEDULE = "run the other presses on the schedules with decode"
NOT_RUN: Mapping[str, str] = {
    "ComposedPress": "combine other presses",
    "PerLayerCompressionPress": "combine other presses",
    "DecodingPress": _SCHEDULE,
    "PrefillDecodingPress": _SCHEDULE,
    "CompressionRatioDecodingPress": "have a budget that grows with the output",
    "DMSPress": "set a threshold, not a budget",
    "SimLayerKVPress": "set a threshold, not a budget",
    "ThinKPress": "remove channels of keys, not tokens",
    "FinchPress": "need a delimiter token in the prompt and in the vocabulary",
    "DuoAttentionPress": _FILES,
    "ExpectedAttentionStatsPress": _FILES,
    "FastKVzipPress": _FILES,
    "KVzapPress": _FILES,
    "LUKVPress": _FILES,
    "QFilterPress": _FILES,
    "RestoreKVPress": _FILES,
}
"""Why presses are not among the default ones."""

_OTHER = "not among --presses"


def chosen_presses(presses: str, budgets: Sequence[str]) -> tuple[str, ...]:
    """The presses that run.

    Args:
        presses: texts of presses, separated by semicolons.
        budgets: caps of the leaderboard.

    Raises:
        ConfigError: a press or a budget is invalid.
    """
    texts = tuple(dict.fromkeys(part.strip() for part in presses.split(";") if part.strip()))
    if not texts:
        raise ConfigError("--presses has no values: name at least one, or leave it out")
    for text in texts:
        spec_of(text)
    for budget in budgets:
        removed_of(budget)
    return texts


def spec_of(text: str) -> dict[str, object]:
    """The name of a press and its options as JSON values.

    Raises:
        ConfigError: the text is invalid.
    """
    parsed = parse_policy(text, "press")
    options = {name: _value(value) for name, value in parsed.options.items()}
    return {"name": parsed.name, "options": options}


def _value(text: str) -> object:
    if text.startswith("(") and text.endswith(")"):
        return spec_of(text[1:-1])
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def removed_of(budget: str) -> float:
    """The fraction of a prompt's tokens that kvpress removes for a cap.

    Raises:
        ConfigError: the cap is no fraction of the prompt.
    """
    try:
        fraction = float(budget.removesuffix("%")) / 100
    except ValueError:
        fraction = 0.0
    if not budget.endswith("%") or not 0 < fraction <= 1:
        raise ConfigError(
            f"expected --budgets as fractions of the prompt such as 25% (0% to 100%), got "
            f"{budget!r}: kvpress has no other budgets"
        )
    return 1.0 - fraction


def entry_of(press: str, budget: str, schedule: str) -> BoardEntry:
    """The entry of a press; kvpress's cache has no codec."""
    return BoardEntry(f"{KVPRESS}/{press}", budget, schedule, NO_CODEC, KVPRESS)


def left_out(known: Iterable[str], presses: Sequence[str]) -> dict[str, str]:
    """Why presses of kvpress do not run, by name.

    Args:
        known: names of all presses.
        presses: texts of those that run.
    """
    used = {parse_policy(text, "press").name for text in presses}
    return {name: NOT_RUN.get(name, _OTHER) for name in known if name not in used}
