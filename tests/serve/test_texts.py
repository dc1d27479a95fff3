"""Texts in the server: bounds of their lengths, texts of single tokens, threads of tenants."""

import asyncio
import threading
import time
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from quire.sampling.detokenizer import REPLACEMENT
from quire.sampling.outputs import OutputDelta
from quire.sampling.sampler import SampledToken
from quire.serve.logprobs import TokenPieces
from quire.serve.responses import CompletionWriter
from quire.serve.text import FairPool, text_length

# ---- the lower bound of the number of tokens of a text -------------------------------------------

BYTES = {letter: n for n, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}


def make_tokenizer(normalizer=None, model=None, vocab=BYTES, added=()):
    tokenizer = Tokenizer(model or models.BPE(vocab, []))
    tokenizer.normalizer = normalizer
    tokenizer.add_tokens(list(added))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def characters_per_token(tokenizer):
    return getattr(text_length(tokenizer), "characters_per_token", None)


def test_bound_is_the_longest_vocabulary_entry_and_holds_for_every_text(llm):
    width = characters_per_token(llm.model.tokenizer)
    assert width == len("Ġunderstand")
    assert characters_per_token(make_tokenizer()) == 1
    for text in ("understand " * 100, "particular" * 50, "\n" * 999, "x" * 999, "é你😀" * 333):
        assert len(llm.encode(text)) * width >= len(text)


@pytest.mark.parametrize(
    ("normalizer", "expected"),
    [
        (normalizers.NFC(), 4),
        (normalizers.Sequence([normalizers.NFKC(), normalizers.Prepend("_")]), 4),
        (normalizers.Replace(" ", "_"), 1),
        (normalizers.Replace("  ", " "), None),
        (normalizers.Strip(), None),
        (normalizers.Sequence([normalizers.NFC(), normalizers.StripAccents()]), None),
    ],
)
def test_shortening_normalizer_widens_or_removes_the_bound(normalizer, expected):
    assert characters_per_token(make_tokenizer(normalizer)) == expected


@pytest.mark.parametrize("sides", [{"lstrip": True}, {"rstrip": True}, {}])
@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("normalizer", [None, normalizers.NFC(), normalizers.Replace(" ", "_")])
def test_spaces_stripped_by_an_added_token_are_not_counted(sides, special, normalizer):
    token = AddedToken("<mask>", special=special, normalized=False, **sides)
    tokenizer = make_tokenizer(normalizer, added=[token])
    length = text_length(tokenizer)
    spaces = " \n\t\u00a0\u3000\u2029" * 500

    for text in (spaces, f"<mask>{spaces}", f"{spaces}<mask>", f"a{spaces}<mask>{spaces}b" * 3):
        num_tokens = len(tokenizer(text, add_special_tokens=False).input_ids)
        assert length.min_tokens(text) <= num_tokens
    assert length.min_tokens("x" * 6000) >= 6000 // (4 * len("<mask>"))
    assert length.min_tokens(spaces) >= len(spaces) // (4 * len("<mask>"))
    assert length.stripping == (("<mask>",) if sides else ())


def test_no_bound_for_a_stripping_token_in_normalized_text_and_merged_unknown_characters():
    token = AddedToken("<mask>", lstrip=True, normalized=True)
    words = models.WordLevel({"<unk>": 0, "Hi": 1}, unk_token="<unk>")
    assert text_length(make_tokenizer(normalizers.NFKC(), added=[token])) is None
    assert text_length(make_tokenizer(added=[token])).stripping == ("<mask>",)
    assert characters_per_token(make_tokenizer(model=words)) is None


# ---- texts, bytes and positions of single tokens, for all kinds of tokenizers --------------------


@pytest.fixture(scope="module")
def sentence_pieces():
    """A tokenizer like SentencePiece: tokens include leading spaces, with byte fallback."""
    names = ["<unk>", "▁Hello", "▁world", "s", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>"]
    vocab = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    found = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    found.add_special_tokens({"bos_token": "<s>"})  # its id is 8
    return found


def test_token_text_includes_its_leading_space_and_byte_tokens_have_exact_bytes(sentence_pieces):
    pieces = TokenPieces(sentence_pieces)
    assert sentence_pieces.decode([2]) == "world"
    assert [pieces.text(token) for token in (1, 2, 3)] == [" Hello", " world", "s"]
    assert pieces.raw(2) == b" world"
    assert b"".join(pieces.raw(token) for token in (4, 5, 6, 7)).decode() == "😀"


def test_byte_level_tokens_have_exact_bytes(llm):
    pieces, text = TokenPieces(llm.model.tokenizer), "naïve 你好 😀 \x00\n\t~"
    assert b"".join(pieces.raw(token) for token in llm.encode(text)) == text.encode()
    raws = [pieces.raw(token) for token in range(2048)]
    assert len({raw for raw in raws if len(raw) == 1}) == 256


def test_without_a_tokenizer_tokens_are_named_by_their_ids():
    pieces = TokenPieces(None)
    assert (pieces.text(17), pieces.raw(17)) == ("token_id:17", b"token_id:17")
    assert positions(pieces, [3, 4], "") == [("token_id:3", 0), ("token_id:4", 0)]


def positions(pieces, token_ids, text):
    """Text and position of each token of a prompt."""
    return pieces.placed(token_ids, pieces.prompt_offsets(token_ids, text), text)


@pytest.mark.parametrize(
    ("token_ids", "text", "expected"),
    [
        ([1, 2, 3], "Hello worlds", [("Hello", 0), (" world", 5), ("s", 11)]),
        ([8, 1, 2], "Hello world", [("<s>", 0), ("Hello", 0), (" world", 5)]),
        ([8, 1, 2], "<s> Hello world", [("<s>", 0), (" Hello", 3), (" world", 9)]),
        ([1, 4, 5, 6, 7, 3], "Hello😀s", [0, 5, 5, 5, 5, 6]),
        ([1, 4, 5], "Hello\N{REPLACEMENT CHARACTER}", [0, 5, 5]),
        ([1, 2], "Hello", [("Hello", 0), (" world", 5)]),  # a stop text cut the rest
        ([1, 2, 3], "Hello wo", [("Hello", 0), (" world", 5), ("s", 8)]),
        ([1, 2], "hello   World", [(" Hello", 0), (" world", 5)]),  # normalized
        ([4, 1, 2], "\N{REPLACEMENT CHARACTER} Hello world", [0, 1, 7]),
        ([], "", []),
    ],
)
def test_tokens_have_their_position_in_the_text(sentence_pieces, token_ids, text, expected):
    found = positions(TokenPieces(sentence_pieces), token_ids, text)
    if expected and isinstance(expected[0], int):
        found = [offset for _, offset in found]
    assert found == expected


@given(ids=st.lists(st.integers(0, 2047), max_size=30))
def test_positions_in_decoded_prompts_are_those_of_the_tokens(llm, ids):
    pieces, text = TokenPieces(llm.model.tokenizer), llm.model.tokenizer.decode(ids)
    for piece, offset in positions(pieces, ids, text):
        assert offset <= len(text)
        if REPLACEMENT not in piece:
            assert text[offset:].startswith(piece)


@pytest.mark.parametrize(
    ("texts", "chunks"),
    [
        # "#" may begin a stop text: its token is sent with its text, or at the end
        ([("a", 0, "a"), ("#", 1, ""), ("b", 2, "#b")], [[("a", 0)], [("#", 1), ("b", 2)]]),
        ([("a", 0, "a"), ("#", 1, ""), ("#", 2, "")], [[("a", 0)], [("#", 1), ("#", 1)]]),
        ([("a", 0, ""), ("#", 1, "a"), ("b", 2, "#b")], [[("a", 0)], [("#", 1), ("b", 2)]]),
    ],
)
def test_streamed_tokens_have_positions_within_the_sent_text(llm, texts, chunks):
    writer = CompletionWriter(index=0, pieces=TokenPieces(llm.model.tokenizer), wants_logprobs=True)
    reasons, sent = [None] * (len(texts) - 1) + ["stop"], []
    for (token, offset, text), reason in zip(texts, reasons, strict=True):
        sampled = SampledToken(llm.encode(token)[0], -1.0, (), 1, text_offset=offset)
        delta = OutputDelta(request_id="r", text=text, logprobs=(sampled,), finish_reason=reason)
        sent += [choice["logprobs"] for choice in writer.chunks(delta)]

    assert [list(zip(one["tokens"], one["text_offset"], strict=True)) for one in sent] == chunks


# ---- a thread pool with round-robin scheduling between tenants -----------------------------------


def run(main, threads):
    async def with_pool():
        pool = FairPool(threads, "test")
        try:
            return await main(pool)
        finally:
            pool.close()

    return asyncio.run(asyncio.wait_for(with_pool(), 20))


def test_work_runs_in_a_thread_that_an_exception_does_not_end():
    async def main(pool):
        with pytest.raises(ZeroDivisionError):
            await pool.run("a", lambda: 1 / 0)
        return await pool.run("a", lambda: threading.current_thread().name)

    assert run(main, 1).startswith("test")


def test_tenants_are_served_round_robin_in_one_thread():
    jobs, order = ["a0", "a1", "a2", "a3", "b0", "b1", "c0"], []

    async def main(pool):
        await asyncio.gather(*(pool.run(job[0], partial(order.append, job)) for job in jobs))

    run(main, 1)
    assert order == ["a0", "b0", "c0", "a1", "b1", "a2", "a3"]


def test_tenants_with_single_jobs_do_not_starve_a_queue():
    order = []

    async def one_at_a_time(pool, tenant):
        for _ in range(20):
            await pool.run(tenant, lambda: order.append(tenant))

    async def main(pool):
        queue = [pool.run("queue", lambda: order.append("queue")) for _ in range(10)]
        await asyncio.gather(*queue, one_at_a_time(pool, "a"), one_at_a_time(pool, "b"))

    run(main, 1)

    assert order[:30].count("queue") >= 9


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_one_tenant_leaves_a_thread_free(threads):
    running, counts = set(), []

    def work():
        name = threading.current_thread().name
        running.add(name)
        counts.append(len(running))
        time.sleep(0.01)
        running.remove(name)

    async def main(pool):
        await asyncio.gather(*(pool.run("a", work) for _ in range(20)))

    run(main, threads)
    assert max(counts) == max(1, threads - 1)


def test_cancelled_waiting_work_does_not_run():
    calls, release = [], threading.Event()

    async def main(pool):
        first = asyncio.create_task(pool.run("a", release.wait))
        await asyncio.sleep(0)
        second = asyncio.create_task(pool.run("a", lambda: calls.append(1)))
        await asyncio.sleep(0)
        second.cancel()
        release.set()
        await first
        return await pool.run("a", lambda: "next")

    assert run(main, 1) == "next"
    assert not calls


def test_idle_tenants_are_removed():
    async def main(pool):
        await asyncio.gather(*(pool.run(str(n), int) for n in range(50)))
        return pool._tenants

    assert run(main, 3) == {}
