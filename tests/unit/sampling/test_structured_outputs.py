import asyncio
import json
import random
import re
import threading
import unicodedata
import weakref

import jsonschema
import llguidance
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import gbnf_to_lark
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from quire import LLM, AsyncLLM, KVConfig, SamplingParams, ScheduleConfig, StructuredOutputs
from quire.config import structured_outputs as limits
from quire.config.structured_outputs import MAX_CHOICE_VALUES
from quire.errors import QueueFull, RequestError
from quire.sampling import grammar
from quire.sampling.grammar import MAX_COMPILED, GrammarCompiler

PROMPT = "<|doc|>Once upon a time"


def closed(properties, required):
    schema = {"type": "object", "properties": properties, "required": required}
    return schema | {"additionalProperties": False}


NAME, AGE = {"type": "string", "maxLength": 8}, {"type": "integer", "minimum": 0, "maximum": 99}
PERSON = closed({"name": NAME, "age": AGE}, ["name", "age"])
COMPACT = {"json": PERSON, "disable_any_whitespace": True}


@pytest.fixture(scope="module")
def llm():
    return LLM("quire-tiny", dtype="float32", kv=KVConfig(memory="4MiB"), verify=False)


@pytest.fixture
def compiler(llm):
    model = llm.model
    return GrammarCompiler(model.tokenizer, model.spec.vocab_size, model.generation.eos_token_ids)


def generate(llm, wanted, prompt=PROMPT, **options):
    params = SamplingParams(structured_outputs=wanted, **{"max_tokens": 64} | options)
    [output] = llm.generate(prompt, params)
    assert not llm.engine.has_work
    return output


# ---- checks of the options -----------------------------------------------------------------------


def nested(depth):
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("wanted", "param", "message"),
    [
        ({}, "", "exactly one of .* got none"),
        ({"json": PERSON, "regex": "a"}, "", "got json, regex"),
        ({"regexp": "a"}, "", "no option 'regexp'"),
        ("json", "", "expected structured_outputs to be an object"),
        ({"json": "{"}, ".json", "invalid JSON"),
        ({"json": "[1]"}, ".json", "got list"),
        ({"json": 5}, ".json", "got int"),
        ({"json": {"const": float("nan")}}, ".json", "JSON schema"),
        ({"json": {"a": object()}}, ".json", "JSON schema"),
        ({"json": {"enum": [-(2**63)]}}, ".json", "above -2\\^63"),
        ({"json": {"minimum": -1e19, "maximum": -1e19}}, ".json", "above"),
        ({"json": '{"a": [{"const": -9223372036854775807}]}'}, ".json", "above"),
        ({"json": '{"const": "\\ud800"}'}, ".json", "not valid Unicode"),
        ({"json": nested(limits.MAX_NESTING)}, ".json", "64 levels"),
        ({"json": {"a": "b" * limits.MAX_GRAMMAR_BYTES}}, ".json", "131,072 bytes"),
        ({"json": "[" * 100_000}, ".json", "invalid JSON"),
        ({"json_object": 1}, ".json_object", "true or false"),
        ({"regex": ""}, ".regex", "got an empty text"),
        ({"regex": "a" * (limits.MAX_REGEX_BYTES + 1)}, ".regex", "16,384 bytes"),
        ({"regex": "\ud800"}, ".regex", "not valid Unicode"),
        ({"choice": []}, ".choice", "1 to 4,096 texts"),
        ({"choice": ["a"] * (MAX_CHOICE_VALUES + 1)}, ".choice", "got 4,097"),
        ({"choice": ["a", ""]}, ".choice", "none of them empty"),
        ({"choice": "ab"}, ".choice", "list of texts"),
        ({"regex": "a", "whitespace_pattern": " "}, ".whitespace_pattern", "needs json or json"),
    ],
)
def test_invalid_option_is_refused_with_its_name(wanted, param, message):
    with pytest.raises(RequestError, match=message) as refused:
        SamplingParams(structured_outputs=wanted)
    assert refused.value.param == f"structured_outputs{param}"


def test_schema_may_be_text_and_beams_must_read_end_tokens():
    as_object = StructuredOutputs(json=PERSON)
    assert as_object == StructuredOutputs(json=json.dumps(PERSON))
    assert hash(as_object) == hash(StructuredOutputs(json=PERSON))
    assert SamplingParams(structured_outputs={"json": PERSON}).structured_outputs == as_object
    beams = {"use_beam_search": True, "beam_width": 2, "ignore_eos": True}
    with pytest.raises(RequestError, match="ignore_eos") as refused:
        SamplingParams(structured_outputs={"regex": "a"}, **beams)
    assert refused.value.param == "ignore_eos"


# ---- compilation ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"json": {"type": "foo"}}, "Invalid type"),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "Unsatisfiable"),
        ({"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}, "no JSON that en"),
        ({"json": PERSON, "whitespace_pattern": "[ "}, "unterminated"),
        ({"regex": "(a"}, "unterminated subpattern"),
        ({"regex": "()"}, "only the empty text"),
        ({"regex": "(?=a)b"}, "lookahead"),
        ({"regex": "(" * 5000 + "a" + ")" * 5000}, "nest"),
        ({"grammar": "start: nothing"}, "unknown name"),
        ({"grammar": "root ::= x"}, "GBNF"),
        ({"grammar": "root ::= " + "(" * 9000}, "GBNF"),
        ({"grammar": "root := x"}, "Expected value"),
        ({"grammar": "start: " + "(" * 9000 + '"a"' + ")" * 9000}, "nested"),
        ({"grammar": "start: " + '("a" | "b")* ' * 3000}, "use lower counts"),
    ],
)
def test_grammar_that_cannot_be_compiled_is_refused(compiler, wanted, message, monkeypatch):
    monkeypatch.setattr(grammar, "COMPILE_TIMEOUT_S", 600)  # a busy machine has the same reason
    structure = SamplingParams(structured_outputs=wanted).structured_outputs

    with pytest.raises(RequestError, match=f"cannot be compiled: .*{message}") as refused:
        compiler.compile(structure)

    assert refused.value.param == structure.param


@pytest.fixture
def held(monkeypatch):
    """Compilations wait in the library until this event is set."""
    event = threading.Event()

    class Waiting:
        grammar_from_regex = staticmethod(llguidance.LLMatcher.grammar_from_regex)

        def __new__(cls, *arguments, matcher=llguidance.LLMatcher, **options):
            event.wait()
            return matcher(*arguments, **options)

    monkeypatch.setattr(llguidance, "LLMatcher", Waiting)
    yield event
    event.set()


def test_slow_compilation_is_refused_and_too_many_are_refused_for_now(compiler, held, monkeypatch):
    monkeypatch.setattr(grammar, "COMPILE_TIMEOUT_S", 0.001)

    for number in range(grammar.MAX_COMPILATIONS):
        with pytest.raises(RequestError, match="takes more than") as refused:
            compiler.compile(StructuredOutputs(regex=f"a{number}"))
        assert refused.value.param == "structured_outputs.regex"
    with pytest.raises(QueueFull, match="being compiled"):
        compiler.compile(StructuredOutputs(regex="b"))

    held.set()
    monkeypatch.setattr(grammar, "COMPILE_TIMEOUT_S", 60.0)
    compiler.compile(StructuredOutputs(regex="c"))


def test_models_and_installations_without_structures_are_refused(llm, monkeypatch):
    words = tokenizers.Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    no_decoder = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>")

    for tokenizer, vocab_size, end_ids, message in (
        (None, 100, [1], "no tokenizer"),
        (llm.model.tokenizer, 2048, [], "end-of-sequence"),
        (no_decoder, 2, [1], "decoder of this model's tokenizer"),
    ):
        with pytest.raises(RequestError, match=message) as refused:
            GrammarCompiler(tokenizer, vocab_size, end_ids).compile(StructuredOutputs(regex="a"))
        assert refused.value.param == "structured_outputs"

    def refuse(extra, feature):
        raise grammar.ConfigError(f"{feature} needs {extra}")

    monkeypatch.setattr(grammar, "require_extra", refuse)
    compiler = GrammarCompiler(llm.model.tokenizer, 2048, [1])

    with pytest.raises(RequestError, match=r"response_format.*needs structured"):
        compiler.compile(StructuredOutputs(regex="a"))


def test_min_recently_used_grammars_leave_the_cache_and_those_in_use_are_found(compiler):
    first = StructuredOutputs(regex="first")
    compiled = weakref.ref(compiler.compile(first))
    others = [StructuredOutputs(regex=f"other{i}") for i in range(MAX_COMPILED)]
    for some in (others[1:], others[:2]):
        for other in some:
            compiler.compile(other)
        assert compiled() is compiler.compile(first)
    used = compiled()
    for other in others:
        compiler.compile(other)
    assert compiler.compile(first) is used
    del used
    for other in others:
        compiler.compile(other)
    assert compiled() is None


def accepts(compiler, llm, wanted, text):
    """Whether a grammar allows every token of a text and then an end token."""
    matcher, output = compiler.compile(StructuredOutputs(**wanted)).matcher(), []
    for token in token_ids(llm, text):
        if token not in allowed(matcher.mask(output)):
            return False
        output.append(token)
    return llm.model.generation.eos_token_ids[0] in allowed(matcher.mask(output))


@pytest.mark.parametrize(
    ("texts", "other"),
    [
        ([f"choice {number}" for number in range(MAX_CHOICE_VALUES)], "choice x"),
        (['a.b"c', "a\\nb", "[x]*", "é\n", "a|b", "/x/i"], 'axb"c'),
    ],
    ids=["as many as allowed", "no expressions"],
)
def test_choices_are_texts(compiler, llm, texts, other):
    for text in (*texts[:5], texts[-1]):
        assert accepts(compiler, llm, {"choice": texts}, text), text
    assert not accepts(compiler, llm, {"choice": texts}, other)


@pytest.mark.parametrize("rule", ['root ::= "a"', 'start: "a"'])
def test_format_of_a_grammar_is_not_detected_by_the_library(compiler, monkeypatch, rule):
    """Its detection takes 100 s for 100,000 empty lines."""
    monkeypatch.setattr(gbnf_to_lark, "is_lark_syntax", pytest.fail)
    compiler.compile(StructuredOutputs(grammar="\n" * 100_000 + rule))


def test_schema_with_many_optional_members_can_be_generated(compiler, llm):
    inner = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    members = {f"f{number}": {"anyOf": [{"type": "string"}, inner]} for number in range(300)}

    text = '{"f3":"a","f9":{"x":1},"f200":"z"}'

    assert accepts(compiler, llm, {"json": {"properties": members, "type": "object"}}, text)


# ---- matchers ------------------------------------------------------------------------------------


def token_ids(llm, text):
    return llm.model.tokenizer(text, add_special_tokens=False).input_ids


def allowed(mask):
    return {i for i in range(len(mask) * 8) if mask[i // 8] >> (i % 8) & 1}


def test_matcher_is_a_function_of_the_output_and_forks_are_independent(compiler, llm):
    """A matcher that went elsewhere before, as one of a beam, has the masks of a new one."""
    compiled = compiler.compile(StructuredOutputs(regex="(ab|cd|ax)+"))
    moved = compiled.matcher()
    for text in ("abab", "abax", "cd", "", "abab", "ab"):
        output = token_ids(llm, text)
        fresh = compiled.matcher()
        assert allowed(moved.mask(output)) == allowed(fresh.mask(output)), text
        assert allowed(moved.mask(list(output))) == allowed(fresh.mask(output))

    one = compiler.compile(StructuredOutputs(choice=["abc", "xyz"])).matcher()
    start = allowed(one.mask([]))
    one.mask(token_ids(llm, "a"))
    other = one.fork()
    assert allowed(other.mask([])) == start
    assert allowed(other.mask(token_ids(llm, "x"))) != allowed(one.mask(token_ids(llm, "a")))


def test_end_tokens_need_the_end_of_a_grammar_and_other_tokens_are_errors(compiler, llm):
    eos = llm.model.generation.eos_token_ids[0]
    matcher = compiler.compile(StructuredOutputs(regex="ab+c?")).matcher()

    may_end = {text: eos in allowed(matcher.mask(token_ids(llm, text))) for text in ("", "a", "ab")}
    must_end = {text: matcher.must_end(token_ids(llm, text)) for text in ("a", "ab", "abc")}

    assert may_end == {"": False, "a": False, "ab": True}
    assert must_end == {"a": False, "ab": False, "abc": True}
    matcher = compiler.compile(StructuredOutputs(regex="ab")).matcher()
    assert not matcher.mask(token_ids(llm, "x")).any()
    assert "cannot continue" in matcher.error


# ---- outputs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_output_matches_its_schema(llm, temperature):
    output = generate(llm, COMPACT, temperature=temperature, seed=3)

    assert output.finish_reason == "stop"
    jsonschema.validate(json.loads(output.text), PERSON)
    assert ": " not in output.text


@pytest.mark.parametrize(
    ("wanted", "pattern"),
    [
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"regex": "[a-c]{3,5}( [0-9])?"}, "[a-c]{3,5}( [0-9])?"),
        ({"grammar": 'root ::= "x" [0-9] "y"'}, "x[0-9]y"),
        ({"grammar": 'start: "x" /[0-9]/ "y"'}, "x[0-9]y"),
        ({"json_object": True, "whitespace_pattern": " "}, r"\{.*"),
    ],
)
def test_output_matches_its_grammar(llm, wanted, pattern):
    output = generate(llm, wanted, temperature=1.0, seed=7)
    assert re.fullmatch(pattern, output.text), output.text


def test_output_ends_where_it_must_without_an_end_token(llm):
    """Also with options that ban the end token, which no other token could replace."""
    eos = set(llm.model.generation.eos_token_ids)

    output = generate(llm, {"regex": "(a|b){3,5}"}, ignore_eos=True, min_tokens=30)

    assert re.fullmatch("[ab]{5}", output.text)
    assert output.finish_reason == "stop"
    assert not eos & set(output.token_ids)


def test_structures_end_at_limits_end_tokens_and_stop_texts(llm):
    whole = generate(llm, {"regex": "(a|b){3}"}, ignore_eos=True)
    count = len(whole.token_ids)
    assert generate(llm, {"regex": "(a|b){3}"}, max_tokens=count).finish_reason == "stop"
    assert generate(llm, {"regex": "(a|b){9}c"}, max_tokens=2).finish_reason == "length"

    eos = llm.model.generation.eos_token_ids[0]
    output = generate(llm, {"regex": "[a-z ]*"}, logit_bias={eos: 100.0})
    stopped = generate(llm, COMPACT, stop="age")
    assert (output.text, output.finish_reason) == ("", "stop")
    assert stopped.stop_reason == "age"
    assert "age" not in stopped.text


def test_logprobs_are_those_of_the_model_and_other_requests_do_not_change(llm):
    output = generate(llm, {"choice": ["xyz"]}, logprobs=2)

    first = output.logprobs[0]
    assert first.rank > 1
    assert first.logprob < first.top_logprobs[0][1]

    plain = SamplingParams(max_tokens=12)
    structured = SamplingParams(max_tokens=40, structured_outputs=COMPACT)
    alone = [llm.generate(PROMPT, params)[0].text for params in (plain, structured)]

    both = llm.generate([PROMPT, PROMPT], [plain, structured])

    assert [output.text for output in both] == alone


def test_wrong_grammar_of_one_prompt_is_refused_with_its_field(llm):
    params = [SamplingParams(), SamplingParams(structured_outputs={"regex": "(a"})]

    with pytest.raises(RequestError, match="prompt 1: regex cannot be compiled") as refused:
        llm.generate([PROMPT, PROMPT], params)

    assert refused.value.param == "structured_outputs.regex"
    assert not llm.engine.has_work


def test_completions_and_beams_match_with_matchers_of_their_own(llm):
    output = generate(llm, COMPACT, n=4, temperature=1.0, seed=5)

    texts = [choice.text for choice in output.choices]
    for text in texts:
        jsonschema.validate(json.loads(text), PERSON)
    assert len(set(texts)) > 1
    alone = [generate(llm, COMPACT, temperature=1.0, seed=5 + i).text for i in range(4)]
    assert texts == alone

    output = generate(llm, COMPACT, n=3, use_beam_search=True, beam_width=4)

    for choice in output.choices:
        jsonschema.validate(json.loads(choice.text), PERSON)
    assert output.choices[0].score >= output.choices[1].score
    greedy = generate(llm, COMPACT, use_beam_search=True, beam_width=1)
    assert greedy.text == generate(llm, COMPACT).text


def test_grammar_that_cannot_continue_ends_only_its_request(llm, monkeypatch):
    monkeypatch.setitem(grammar.LIMITS, "step_max_items", 120)
    wanted = {"grammar": 'start: e\ne: e e | "a" | e e e'}
    params = [
        SamplingParams(max_tokens=200, structured_outputs=wanted, ignore_eos=True),
        SamplingParams(max_tokens=200, ignore_eos=True),
    ]

    failed, other = llm.generate([PROMPT, PROMPT], params)

    assert failed.finish_reason == "error"
    assert "structured_outputs is too large" in failed.error
    assert len(other.token_ids) == 200


@pytest.mark.parametrize("preempt", ["recompute", "swap"])
def test_preempted_outputs_are_equal(llm, preempt):
    many = {"json": {"type": "array", "items": PERSON, "minItems": 2, "maxItems": 2}}
    options = {"temperature": 1.0, "max_tokens": 64, "structured_outputs": many}
    params = [SamplingParams(seed=seed, n=1 + seed % 2, **options) for seed in range(4)]
    kv = KVConfig(memory="768KiB", swap_space="4MiB" if preempt == "swap" else None)
    schedule = ScheduleConfig(preempt=preempt, admission="optimistic")
    small = LLM(llm.model, kv=kv, schedule=schedule)
    outputs = small.generate([PROMPT] * len(params), params)

    assert small.stats().num_preemptions > 0
    expected = [[c.token_ids for o in llm.generate(PROMPT, p) for c in o.choices] for p in params]
    assert [[c.token_ids for c in o.choices] for o in outputs] == expected


def test_async_stream_is_the_whole_output_and_a_wrong_grammar_is_refused(llm):
    params = SamplingParams(max_tokens=64, structured_outputs=COMPACT)
    wrong = SamplingParams(structured_outputs={"regex": "(a"})
    expected = llm.generate(PROMPT, params)[0].text

    async def main():
        async with AsyncLLM(llm.engine) as engine:
            with pytest.raises(RequestError, match="unterminated") as refused:
                await engine.generate(PROMPT, wrong)
            assert refused.value.param == "structured_outputs.regex"
            return [delta async for delta in engine.stream(PROMPT, params)]

    deltas = asyncio.run(main())

    assert "".join(delta.text for delta in deltas) == expected
    assert deltas[-1].finish_reason == "stop"
    assert not llm.engine.has_work


# ---- dialects ------------------------------------------------------------------------------------

TEXTS = ["", "a", "b", "ab", "ba", "aab", "abc", "K", "k", "\u212a", "é", "ß", "1", "\u0663", "²"]
TEXTS += ["_", " ", "\n", "a\n", "\na", "a b", "a.b", "\x1c", "\x85", "\ufeff", "\u2028", "[", "]"]
TEXTS += ["-", "i", "\u0131", "İ", "\u017f", "S", "A", "\u2167", "\U0001d49c", "\u0301", "a1", "xa"]
TEXTS += ["xab", "abx", "bx", "\\", "/"]
REGEXES = r"""
a|b (a|b)* a??b a+? (?:a|)b a{2}b [ab]{1,2}? (?P<x>a)b (?<x>a)b ^a$ ^a|b$ (^a|b)c? \Aa\Z (a$|ab)
^$|a (?m:a) . .b? (?s).*a [^a] [^ab1] (?a)\w (?a:\d) (?a)\S (?i)k (?i)[a-k] (?i)[^k] (?i)s (?i)i
(?i:A)b [[] [^[] []a] [\]\[] [\-a] [a-] \x61 \141 \u00e9 \n \\ / \/ a?a?b? [a-b]b (?:a?){3}
(a*)*b a{0}b"""
"""Expressions that Python and the library may read differently."""

NOT_KEPT = r"""
(?=a)a (?!b)a (?<=a)b (?<!a)b (a)\1 (?P<x>a)(?P=x) \ba a\B a^b a$b (?m)^a$ (?>a)b a*+ a++b a?+
(a)?(?(1)b|c) [[:alpha:]] [^[:digit:]] [a-z&&[^b]] [a--b] [a~~b] [^\s\S] [a-\p{L}] a{99999999999}
\Qa\E [z-a] (?i *a a{3,2} \p{Nope} \x{110000}"""
PATTERNS = r"""
a|^b ^a|b$ (^|,)a a(b|$) b (?:) ^[ab]? a.b \d ^\w{2}$ [^a] \S\s ^[^\W\d]+$ (?i)^k ^\D$
^(a|b|[0-9]{2})$"""


@pytest.mark.parametrize("regex", [*REGEXES.split(), "(?x) a # letter\n b"])
@pytest.mark.filterwarnings("ignore:Possible nested set")
def test_regex_matches_what_python_matches(compiler, llm, regex):
    plain = regex.replace("(?<x>", "(?P<x>")

    matched = [text for text in TEXTS if accepts(compiler, llm, {"regex": regex}, text)]

    assert matched == [text for text in TEXTS if re.fullmatch(plain, text)]


CHARACTERS = "adeé1\u0663²_. \x85\ufeff"
NO_DIGITS, NO_SPACES = "adeé²_. \x85\ufeff", "adeé1\u0663²_."


@pytest.mark.parametrize("form", ["regex", "grammar", "pattern", "schema of a grammar"])
@pytest.mark.parametrize(
    ("regex", "expected"),
    [
        *((r"\d", "1"), (r"[\d.]", "1."), (r"(?:\d|e)", "e1"), (r"(?i:[\dE])", "e1")),
        *((r"\D", NO_DIGITS), (r"[^\d]", NO_DIGITS), (r"[^\d.]", NO_DIGITS.replace(".", ""))),
        *((r"[^\D]", "1"), (r"[\D1]", NO_DIGITS + "1"), (r"\w", "ade1_"), (r"[^\W_]", "ade1")),
        *((r"\W", ". \x85\ufeff"), (r"[^\w.]", " \x85\ufeff"), (r"\s", " "), (r"[\s\d]", "1 ")),
        *((r"\S", NO_SPACES), (r"[^\s_]", NO_SPACES.replace("_", "")), (r"[\\d]", "d")),
        *((r"[\w\W]", CHARACTERS), (r"[\S\s]", CHARACTERS), (r"\p{Nd}", "1\u0663")),
        (r"(?a:\D)", "adeé\u0663²_. \x85\ufeff"),
    ],
)
def test_classes_are_ascii_and_their_complements_exclude_unicode_too(
    compiler, llm, regex, expected, form
):
    schema = {"type": "string", "pattern": f"^{regex}$"}
    wanted, written = {
        "regex": ({"regex": regex}, "{}"),
        "grammar": ({"grammar": f"start: /{regex}/"}, "{}"),
        "pattern": ({"json": schema}, '"{}"'),
        "schema of a grammar": ({"grammar": f"start: %json {json.dumps(schema)}"}, '"{}"'),
    }[form]

    matched = [c for c in CHARACTERS if accepts(compiler, llm, wanted, written.format(c))]

    assert matched == [c for c in CHARACTERS if c in expected]
    assert accepts(compiler, llm, {"regex": r"\\d"}, r"\d")


@pytest.mark.parametrize("regex", NOT_KEPT.split())
@pytest.mark.parametrize("form", ["regex", "pattern", "grammar"])
def test_regex_that_cannot_be_kept_is_refused(compiler, regex, form):
    wanted = {
        "regex": {"regex": regex},
        "pattern": {"json": {"type": "string", "pattern": regex}},
        "grammar": {"grammar": f"start: /{regex}/"},
    }[form]
    with pytest.raises(RequestError, match="cannot be compiled"):
        compiler.compile(StructuredOutputs(**wanted))


def test_expressions_are_read_as_in_other_dialects(compiler, llm):
    wanted = {"regex": r"[\p{Lu}\p{N}_]"}

    matched = [text for text in TEXTS if accepts(compiler, llm, wanted, text)]

    kinds = {text: unicodedata.category(text) for text in TEXTS if len(text) == 1}
    assert matched == [one for one in kinds if kinds[one] in ("Lu", "Nd", "Nl", "No", "Pc")]
    wanted = {"grammar": '# a " comment /[/\nstart: A "/" /[^[]/i // [[:x:]]\nA: /\\w/s\n'}
    texts = ("_/²", "a/]", "²/a", "a/[")
    assert [accepts(compiler, llm, wanted, text) for text in texts] == [True, True, False, False]


def sampled(compiler, llm, wanted, seed, max_tokens=100):
    """A random text of a grammar; None if it does not end."""
    matcher, output, choice = compiler.compile(wanted).matcher(), [], random.Random(seed)
    eos = set(llm.model.generation.eos_token_ids)
    for _ in range(max_tokens):
        following = sorted(allowed(matcher.mask(output)))
        if (eos & set(following) and choice.random() < 0.4) or not set(following) - eos:
            return llm.model.tokenizer.decode(output)
        output.append(choice.choice([token for token in following if token not in eos]))
    return None


@pytest.mark.parametrize("pattern", [*PATTERNS.split(), "^a\n?$"])
@pytest.mark.parametrize("name", ["pattern", "patternProperties"])
def test_pattern_of_a_schema_holds_for_sampled_outputs(compiler, llm, pattern, name):
    schema = {"type": "string", "pattern": pattern}
    if name == "patternProperties":
        schema = {"type": "object", name: {pattern: {}}, "additionalProperties": False}
    wanted = StructuredOutputs(json=schema)

    outputs = [sampled(compiler, llm, wanted, seed) for seed in range(12)]

    for output in filter(None, outputs):
        jsonschema.validate(json.loads(output), schema)


INTEGER, NULL = {"type": "integer"}, {"type": "null"}
NO_BRACKET = {"pattern": "^[^[]$", "type": "string"}


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"type": "integer", "minimum": 5, "exclusiveMinimum": True}, "6", "5"),
        ({"type": "number", "maximum": 5, "exclusiveMaximum": True}, "4.5", "5"),
        ({"type": "integer", "minimum": 5, "exclusiveMinimum": False}, "5", "4"),
        ({"type": "array", "items": [INTEGER], "additionalItems": False}, "[1]", "[1,2]"),
        ({"type": "array", "uniqueItems": False}, "[1,1]", "1"),
        ({"type": "string", "minLength": 2.0}, '"ab"', '"a"'),
        ({"type": "integer", "maximum": 2**53 + 1}, str(2**53), str(2**53 + 2)),
        (
            {"id": "http://a.b/c", "$ref": "#/definitions/a", "definitions": {"a": NULL}},
            "null",
            "1",
        ),
        ({"$schema": "http://json-schema.org/draft-04/schema#", "const": 5}, "5", "6"),
        ({"$ref": "#/components/a", "components": {"a": NO_BRACKET}}, '"a"', '"["'),
        ({"$ref": "#a", "$defs": {"x": {"$anchor": "a", "type": "integer"}}}, "1", "null"),
        ({"type": "array", "items": {"$ref": "#"}}, "[[],[[]]]", "[1]"),
        ({"$defs": {"a": {"not": {}}}, "type": "integer"}, "1", "null"),
        (closed({"not": NULL}, ["not"]), '{"not":null}', "{}"),
        ({"enum": [{"not": 1, "pattern": "("}]}, '{"not":1,"pattern":"("}', "{}"),
    ],
)
def test_schema_of_any_draft_is_kept(compiler, llm, schema, valid, invalid):
    wanted = {"json": schema, "disable_any_whitespace": True}
    assert accepts(compiler, llm, wanted, valid)
    assert not accepts(compiler, llm, wanted, invalid)


LOOPS = {"a": {"$ref": "#/$defs/b"}, "b": {"allOf": [{"$ref": "#/$defs/a"}]}}


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"exclusiveMinimum": True}, "needs `minimum`"),
        ({"maximum": "5"}, '/maximum to be a number, got "5"'),
        ({"multipleOf": 0}, "above 0"),
        ({"minLength": -1}, "whole number"),
        ({"properties": {"a": {"required": True}}}, "/properties/a/required to be a list"),
        ({"properties": [1]}, "object of schemas"),
        ({"items": {"additionalProperties": 5}}, "/items/additionalProperties to be a schema"),
        ({"pattern": 5}, "/pattern to be a text"),
        ({"format": 5}, "/format to be a text"),
        ({"type": "string", "format": "nope"}, "give a `pattern`"),
        ({"anyOf": {}}, "list of schemas"),
        ({"enum": []}, "list of values"),
        ({"const": [2**53 + 1]}, "numbers from"),
        ({"type": ["integer", "any"]}, "Invalid type"),
        ({"$ref": 5}, "/\\$ref to be a text"),
        ({"$ref": "#/$defs/a"}, "which the schema does not have"),
        ({"$ref": "https://example.com/schema"}, "Resource"),
        ({"pattern": "a", "allOf": [{"pattern": f"a{n}"} for n in range(60)]}, "a text must match"),
        ({"patternProperties": {f"^{n}": {} for n in range(300)}}, "at most 200 patterns"),
        ({"multipleOf": 999983}, "up to 100,000"),
        ({"multipleOf": 0.999983}, "up to 5 digits"),
        ({"x-guidance": {"lenient": True}}, "x-guidance is not supported"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "write anyOf"),
        ({"minProperties": 2}, "minProperties cannot be kept"),
        ({"patternProperties": {"a": {}, "(?:a)": {}, "[a]": {}}}, "same names"),
        ({"properties": {str(n): {} for n in range(2001)}}, "2,001 optional properties"),
        ({"$ref": "#"}, "no JSON that ends"),
        ({"anyOf": [{"$ref": "#"}]}, "no JSON that ends"),
        ({"$ref": "#/$defs/a", "$defs": LOOPS}, "no JSON that ends"),
        ({"type": "array", "minItems": 1, "items": {"$ref": "#"}}, "no JSON that ends"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "no JSON that"),
        *(
            ({"properties": {"a": {keyword: {}}}}, f"leave out the keyword '{keyword}'")
            for keyword in ("not", "if", "contains", "propertyNames", "unevaluatedItems", "extends")
        ),
        *(
            ({keyword: {"a": ["b"]}}, f"leave out the keyword '{keyword}'")
            for keyword in ("dependentRequired", "dependencies", "divisibleBy", "disallow")
        ),
    ],
)
@pytest.mark.parametrize("form", ["json", "grammar"])
def test_schema_that_cannot_be_kept_is_refused(compiler, schema, message, form):
    text = json.dumps(schema)
    wanted = {"json": text} if form == "json" else {"grammar": f"start: %json {text}"}
    if form == "grammar" and "x-guidance" in schema:
        message = "expected x-guidance to have"
    with pytest.raises(RequestError, match=message):
        compiler.compile(StructuredOutputs(**wanted))


def test_deep_chains_are_followed_and_too_many_rules_refused(compiler, llm):
    """Also in a thread with a small stack, which the library would exceed."""
    chain = {str(n): {"items": {"$ref": f"#/$defs/{n + 1}"}} for n in range(2000)}
    schema = {"$ref": "#/$defs/0", "$defs": chain | {"2000": {"type": "null"}}}
    assert accepts(compiler, llm, {"json": schema}, "[[[]]]")

    def chain(depth):
        return "start: A0\n" + "".join(f'A{n}: (A{n + 1} "x")*\n' for n in range(depth))

    assert accepts(compiler, llm, {"grammar": f'{chain(50)}A50: "a"'}, "xx")
    with pytest.raises(RequestError, match="64 levels deep"):
        compiler.compile(StructuredOutputs(grammar=f'{chain(2000)}A2000: "a"'))
    rules = "".join(f"a{n}: A{n} a{n + 1}\nA{n}: /{n}/\n" for n in range(100))
    assert accepts(compiler, llm, {"grammar": f'start: a99\n{rules}a100: "b"'}, "99b")
    many = " & ".join(f"/(?s:.*){n}(?s:.*)/" for n in range(60))
    with pytest.raises(RequestError, match="operators `&`"):
        compiler.compile(StructuredOutputs(grammar=f"start: A\nA: {many}"))


# ---- random schemas ------------------------------------------------------------------------------

NAMES = st.text("abcxyz_", min_size=1, max_size=4)
LEAVES = st.one_of(
    st.sampled_from([{"type": "boolean"}, {"type": "null"}]),
    st.builds(
        lambda low, span: {"type": "integer", "minimum": low, "maximum": low + span},
        *(st.integers(-20, 20), st.integers(0, 50)),
    ),
    st.builds(
        lambda low, span: {"type": "string", "minLength": low, "maxLength": low + span},
        *(st.integers(0, 2), st.integers(0, 3)),
    ),
    st.builds(lambda texts: {"enum": texts}, st.lists(NAMES, min_size=1, max_size=3, unique=True)),
    st.builds(lambda value: {"const": value}, st.one_of(NAMES, st.integers(0, 9), st.booleans())),
)


def _around(inner):
    objects = st.dictionaries(NAMES, inner, max_size=3).flatmap(
        lambda found: st.sets(st.sampled_from([*found, ""])).map(
            lambda optional: closed(found, [name for name in found if name not in optional])
        )
    )
    arrays = st.builds(
        lambda one, low, n: {"type": "array", "items": one, "minItems": low, "maxItems": low + n},
        *(inner, st.integers(0, 2), st.integers(0, 1)),
    )
    return st.one_of(objects, arrays, st.builds(lambda a, b: {"anyOf": [a, b]}, inner, inner))


SCHEMAS = st.recursive(LEAVES, _around, max_leaves=5)


@pytest.mark.slow
@given(schema=SCHEMAS, seed=st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_output_of_a_random_schema_validates(llm, schema, seed):
    wanted = {"json": schema, "whitespace_pattern": " "}

    output = generate(llm, wanted, temperature=1.5, seed=seed, max_tokens=400)

    assert output.finish_reason == "stop"
    jsonschema.validate(json.loads(output.text), schema)
