"""Advice for a request that never fits: only changes that would admit it."""

import pytest

from quire.kv.memory import KVMemory
from quire.layout.eviction import DECODE, KEEP_ALL, PREFILL_END, PRESSURE, EvictionSpec
from quire.layout.layout import layout_for
from quire.layout.statistics import AttentionMax, ScoringPass
from quire.scheduler.peaks import Need, Peaks, possible_changes
from support.model_specs import small_spec

FULL, WINDOW = None, 24
PAGE_TOKENS, CHUNK = 4, 64
COLUMN_BYTES = 2 * 8 * 2 * 4 * PAGE_TOKENS  # per layer: keys and values of two heads of 8 elements


def peaks_of(*windows, columns=32, offload_tokens=0, evicting=False):
    """Peaks over a memory that holds `columns` pages of one layer."""
    model = small_spec(*windows)
    layout = layout_for(model, codec="float32", page_tokens=PAGE_TOKENS, evicting=evicting)
    peaks = Peaks(KVMemory(layout, columns * COLUMN_BYTES, 4), CHUNK)
    peaks.offloaded_tokens = offload_tokens
    peaks.offload_bytes = offload_tokens * len(windows) * COLUMN_BYTES // PAGE_TOKENS
    return peaks


def need(prompt, generated, eviction=KEEP_ALL, *, may_offload=True):
    return Need(prompt + generated, prompt, eviction, may_offload)


def scores(chunk):
    return AttentionMax(of=ScoringPass("", "", "", "", chunk_tokens=chunk, overlap=0))


@pytest.mark.parametrize(
    ("peaks", "requested", "advice"),
    [
        pytest.param(
            peaks_of(FULL, FULL),
            need(100, 100),
            "shorten the prompt and lower max_tokens, raise --kv-memory to 50KiB or evict tokens "
            "with --evict RULE:cap=TOKENS",
            id="two layers cannot be offloaded and half of the request does not fit",
        ),
        pytest.param(
            peaks_of(*4 * [FULL]),
            need(100, 1),
            "shorten the prompt, raise --kv-memory to 52KiB, set --kv-offload-memory to 48KiB or "
            "evict tokens with --evict RULE:cap=TOKENS",
            id="KV offload suffices",
        ),
        pytest.param(
            peaks_of(*4 * [FULL], offload_tokens=8),
            need(20, 60),
            "lower max_tokens, raise --kv-memory to 37KiB, raise --kv-offload-memory to 32KiB or "
            "evict tokens with --evict RULE:cap=TOKENS",
            id="more offload memory suffices",
        ),
        pytest.param(
            peaks_of(*4 * [FULL], offload_tokens=1000),
            need(40, 300),
            "lower max_tokens, raise --kv-memory to 44KiB or evict tokens with "
            "--evict RULE:cap=TOKENS",
            id="staging alone is too large",
        ),
        pytest.param(
            peaks_of(*4 * [FULL], evicting=True),
            need(100, 1, EvictionSpec(cap=80, every=4)),
            "shorten the prompt, raise --kv-memory to 45KiB, set --kv-offload-memory to 41KiB or "
            "lower cap= of its eviction rule",
            id="a lower cap suffices",
        ),
        pytest.param(
            peaks_of(*4 * [FULL], evicting=True),
            need(100, 1, EvictionSpec(cap=8, every=4, when=DECODE)),
            "shorten the prompt, raise --kv-memory to 57KiB or set when=prefill_and_decode and a "
            "lower cap= in its eviction rule",
            id="the prompt is prefilled whole",
        ),
        pytest.param(
            peaks_of(*4 * [FULL], columns=90, evicting=True),
            need(200, 1, EvictionSpec(cap=8, when=PREFILL_END, statistics=(scores(100),))),
            "shorten the prompt, raise --kv-memory to 47KiB, lower cap= of its eviction rule or "
            "lower chunk= of its eviction rule to 64",
            id="the scoring pass has large chunks",
        ),
    ],
)
def test_advice_names_only_changes_that_admit_the_request(peaks, requested, advice):
    assert not peaks.fits_alone(requested)
    assert possible_changes(peaks, requested, 1) == advice


def test_windows_need_shorter_chunks_but_no_cap():
    """24 tokens and a chunk of 64 are more than 32 pages of 4 layers; shorter chunks fit."""
    peaks, small = peaks_of(*4 * [WINDOW]), peaks_of(*4 * [WINDOW], columns=24)

    assert peaks.fits_alone(need(100, 1))
    assert peaks.counts([need(100, 1)]).sum() <= 32
    assert not small.fits_alone(need(100, 1))
    assert (
        possible_changes(small, need(100, 1), 1)
        == "shorten the prompt or raise --kv-memory to 14KiB"
    )


def test_advice_for_beams_is_fewer_beams_or_earlier_eviction():
    peaks = peaks_of(FULL, FULL, evicting=True)
    spec = EvictionSpec(cap=16, every=4, when=PRESSURE)

    assert possible_changes(peaks, need(20, 40, spec, may_offload=False), 2) == (
        "use fewer beams, lower max_tokens, raise --kv-memory to 29KiB or set "
        "when=prefill_and_decode in its eviction rule"
    )


def test_peak_is_counted_with_the_largest_chunk_that_fits():
    """4 layers of 25 pages: 2 staging slots hold 24 of them in 48 pages, one in 24."""
    for columns, slots in ((56, 2), (30, 1)):
        peaks = peaks_of(*4 * [FULL], columns=columns, offload_tokens=1000)

        [pages] = peaks.counts([need(100, 1)])[0].tolist()

        assert slots * 24 < pages <= columns
    assert not peaks_of(*4 * [FULL], columns=27, offload_tokens=1000).fits_alone(need(100, 1))
