"""Structured outputs: checks, compilation, and outputs of the engine that match their grammar."""

import asyncio
import json
import re
import weakref

import jsonschema
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import gbnf_to_lark
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from quire import LLM, AsyncLLM, KVConfig, SamplingParams, ScheduleConfig, StructuredOutputs
from quire.config.structured_outputs import (
    MAX_CHOICE_VALUES,
    MAX_GRAMMAR_BYTES,
    MAX_NESTING,
    MAX_REGEX_BYTES,
)
from quire.errors import RequestError
from quire.sampling import grammar
from quire.sampling.grammar import MOST_COMPILED, GrammarCompiler

PROMPT = "<|doc|>Once upon a time"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
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
        ({}, "structured_outputs", "exactly one of .* got none"),
        ({"json": PERSON, "regex": "a"}, "structured_outputs", "got json, regex"),
        ({"regexp": "a"}, "structured_outputs", "no option 'regexp'"),
        ("json", "structured_outputs", "expected structured_outputs to be an object"),
        ({"json": "{"}, "structured_outputs.json", "invalid JSON"),
        ({"json": "[1]"}, "structured_outputs.json", "got list"),
        ({"json": 5}, "structured_outputs.json", "got int"),
        ({"json": {"const": float("nan")}}, "structured_outputs.json", "JSON schema"),
        ({"json": {"a": object()}}, "structured_outputs.json", "JSON schema"),
        ({"json": {"enum": [-(2**63)]}}, "structured_outputs.json", "above -2\\^63"),
        ({"json": {"minimum": -1e19, "maximum": -1e19}}, "structured_outputs.json", "above"),
        ({"json": '{"a": [{"const": -9223372036854775807}]}'}, "structured_outputs.json", "above"),
        ({"json": '{"const": "\\ud800"}'}, "structured_outputs.json", "not valid Unicode"),
        ({"json": nested(MAX_NESTING)}, "structured_outputs.json", "64 levels"),
        ({"json": {"a": "b" * MAX_GRAMMAR_BYTES}}, "structured_outputs.json", "131,072 bytes"),
        ({"json": "[" * 100_000}, "structured_outputs.json", "invalid JSON"),
        ({"json_object": 1}, "structured_outputs.json_object", "true or false"),
        ({"regex": ""}, "structured_outputs.regex", "got an empty text"),
        ({"regex": "a" * (MAX_REGEX_BYTES + 1)}, "structured_outputs.regex", "16,384 bytes"),
        ({"regex": "\ud800"}, "structured_outputs.regex", "not valid Unicode"),
        ({"choice": []}, "structured_outputs.choice", "1 to 4,096 texts"),
        ({"choice": ["a"] * (MAX_CHOICE_VALUES + 1)}, "structured_outputs.choice", "got 4,097"),
        ({"choice": ["a", ""]}, "structured_outputs.choice", "none of them empty"),
        ({"choice": "ab"}, "structured_outputs.choice", "list of texts"),
        (
            {"regex": "a", "whitespace_pattern": " "},
            "structured_outputs.whitespace_pattern",
            "needs json or json_object",
        ),
    ],
)
def test_invalid_option_is_refused_with_its_name(wanted, param, message):
    with pytest.raises(RequestError, match=message) as refused:
        SamplingParams(structured_outputs=wanted)

    assert refused.value.param == param


def test_schema_may_be_an_object_or_text():
    as_object = StructuredOutputs(json=PERSON)

    assert as_object == StructuredOutputs(json=json.dumps(PERSON))
    assert hash(as_object) == hash(StructuredOutputs(json=PERSON))
    assert SamplingParams(structured_outputs={"json": PERSON}).structured_outputs == as_object


def test_beam_search_that_ignores_end_tokens_is_refused():
    with pytest.raises(RequestError, match="ignore_eos") as refused:
        SamplingParams(
            structured_outputs={"regex": "a"}, use_beam_search=True, beam_width=2, ignore_eos=True
        )

    assert refused.value.param == "ignore_eos"


# ---- compilation ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"json": {"type": "foo"}}, "Invalid type"),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "Unsatisfiable"),
        ({"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}, "NoExtension"),
        ({"json": PERSON, "whitespace_pattern": "[ "}, "unclosed"),
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": "(" * 5000 + "a" + ")" * 5000}, "nest"),
        ({"grammar": "start: nothing"}, "unknown name"),
        ({"grammar": "root ::= x"}, "GBNF"),
        ({"grammar": "root ::= " + "(" * 9000}, "GBNF"),
        ({"grammar": "root := x"}, "Expected value"),
        ({"grammar": "start: " + "(" * 9000 + '"a"' + ")" * 9000}, "nested"),
        ({"grammar": "start: " + '("a" | "b")* ' * 3000}, "Too many items"),
    ],
)
def test_grammar_that_cannot_be_compiled_is_refused(compiler, wanted, message):
    structure = SamplingParams(structured_outputs=wanted).structured_outputs

    with pytest.raises(RequestError, match=f"cannot be compiled: .*{message}") as refused:
        compiler.compile(structure)

    assert refused.value.param == structure.param


def test_empty_text_as_the_only_match_is_refused(compiler):
    with pytest.raises(RequestError, match="only the empty text"):
        compiler.compile(StructuredOutputs(regex="()"))


def test_slow_compilation_is_refused(llm):
    seconds = iter([0.0, 1.0, 9.0])
    model = llm.model
    slow = GrammarCompiler(
        model.tokenizer,
        model.spec.vocab_size,
        model.generation.eos_token_ids,
        clock=lambda: next(seconds),
    )

    with pytest.raises(RequestError, match="more than 5 s") as refused:
        slow.compile(StructuredOutputs(json=PERSON))

    assert refused.value.param == "structured_outputs.json"


def test_model_without_a_tokenizer_is_refused():
    with pytest.raises(RequestError, match="no tokenizer") as refused:
        GrammarCompiler(None, 100, [1]).compile(StructuredOutputs(regex="a"))

    assert refused.value.param == "structured_outputs"


def test_model_without_an_end_token_is_refused(llm):
    with pytest.raises(RequestError, match="end-of-sequence"):
        GrammarCompiler(llm.model.tokenizer, 2048, []).compile(StructuredOutputs(regex="a"))


def test_tokenizer_whose_decoder_is_unknown_is_refused():
    words = tokenizers.Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>")

    with pytest.raises(RequestError, match="decoder of this model's tokenizer") as refused:
        GrammarCompiler(tokenizer, 2, [1]).compile(StructuredOutputs(regex="a"))

    assert refused.value.param == "structured_outputs"


def test_missing_package_is_refused_with_its_extra(llm, monkeypatch):
    def refuse(extra, feature):
        raise grammar.ConfigError(f"{feature} needs {extra}")

    monkeypatch.setattr(grammar, "require_extra", refuse)
    compiler = GrammarCompiler(llm.model.tokenizer, 2048, [1])

    with pytest.raises(RequestError, match=r"response_format.*needs structured"):
        compiler.compile(StructuredOutputs(regex="a"))


def test_least_recently_used_grammars_leave_the_cache(compiler):
    first = StructuredOutputs(regex="first")
    compiled = weakref.ref(compiler.compile(first))
    others = [StructuredOutputs(regex=f"other{i}") for i in range(MOST_COMPILED)]

    for other in others[1:]:
        compiler.compile(other)
    assert compiled() is compiler.compile(first)
    for other in others[:2]:
        compiler.compile(other)
    assert compiled() is compiler.compile(first)
    for other in others:
        compiler.compile(other)

    assert compiled() is None


def test_grammar_in_use_is_found_without_the_cache(compiler):
    first = StructuredOutputs(regex="first")
    compiled = compiler.compile(first)

    for number in range(MOST_COMPILED):
        compiler.compile(StructuredOutputs(regex=f"other{number}"))

    assert compiler.compile(first) is compiled


def accepts(compiler, llm, wanted, text):
    """Whether a grammar allows every token of a text and then an end token."""
    matcher, output = compiler.compile(StructuredOutputs(**wanted)).matcher(), []
    for token in token_ids(llm, text):
        if token not in allowed(matcher.mask(output)):
            return False
        output.append(token)
    return llm.model.generation.eos_token_ids[0] in allowed(matcher.mask(output))


def test_as_many_choices_as_allowed_can_be_generated(compiler, llm):
    texts = [f"choice {number}" for number in range(MAX_CHOICE_VALUES)]

    for text in (texts[0], texts[1], texts[-1]):
        assert accepts(compiler, llm, {"choice": texts}, text)
    assert not accepts(compiler, llm, {"choice": texts}, "choice x")


@pytest.mark.parametrize("rule", ['root ::= "a"', 'start: "a"'])
def test_format_of_a_grammar_is_not_detected_by_the_library(compiler, monkeypatch, rule):
    """Its detection takes 100 s for 100,000 empty lines."""

    def detect(text):
        raise AssertionError("slow")

    monkeypatch.setattr(gbnf_to_lark, "is_lark_syntax", detect)

    compiler.compile(StructuredOutputs(grammar="\n" * 100_000 + rule))


def test_choices_are_texts_and_no_expressions(compiler, llm):
    texts = ['a.b"c', "a\\nb", "[x]*", "é\n", "a|b", "/x/i"]

    for text in texts:
        assert accepts(compiler, llm, {"choice": texts}, text), text
    assert not accepts(compiler, llm, {"choice": texts}, 'axb"c')


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


def test_matcher_is_a_function_of_the_output(compiler, llm):
    """A matcher that went elsewhere before, as one of a beam, has the masks of a new one."""
    compiled = compiler.compile(StructuredOutputs(regex="(ab|cd|ax)+"))
    moved = compiled.matcher()
    for text in ("abab", "abax", "cd", "", "abab", "ab"):
        output = token_ids(llm, text)
        fresh = compiled.matcher()
        assert allowed(moved.mask(output)) == allowed(fresh.mask(output)), text
        assert allowed(moved.mask(list(output))) == allowed(fresh.mask(output))


def test_forks_do_not_affect_each_other(compiler, llm):
    one = compiler.compile(StructuredOutputs(choice=["abc", "xyz"])).matcher()
    start = allowed(one.mask([]))
    one.mask(token_ids(llm, "a"))
    other = one.fork()

    assert allowed(other.mask([])) == start
    assert allowed(other.mask(token_ids(llm, "x"))) != allowed(one.mask(token_ids(llm, "a")))


def test_end_token_is_allowed_only_where_the_grammar_may_end(compiler, llm):
    eos = llm.model.generation.eos_token_ids[0]
    matcher = compiler.compile(StructuredOutputs(regex="ab+c?")).matcher()

    may_end = {text: eos in allowed(matcher.mask(token_ids(llm, text))) for text in ("", "a", "ab")}
    must_end = {text: matcher.must_end(token_ids(llm, text)) for text in ("a", "ab", "abc")}

    assert may_end == {"": False, "a": False, "ab": True}
    assert must_end == {"a": False, "ab": False, "abc": True}


def test_matcher_that_got_another_token_has_an_error(compiler, llm):
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


def test_complete_structure_at_the_length_limit_is_a_stop(llm):
    whole = generate(llm, {"regex": "(a|b){3}"}, ignore_eos=True)
    count = len(whole.token_ids)

    assert generate(llm, {"regex": "(a|b){3}"}, max_tokens=count).finish_reason == "stop"
    assert generate(llm, {"regex": "(a|b){9}c"}, max_tokens=2).finish_reason == "length"


def test_end_token_ends_an_output_that_could_continue(llm):
    output = generate(
        llm, {"regex": "[a-z ]*"}, logit_bias={llm.model.generation.eos_token_ids[0]: 100.0}
    )

    assert (output.text, output.finish_reason) == ("", "stop")


def test_stop_text_ends_a_structured_output(llm):
    output = generate(llm, COMPACT, stop="age")

    assert output.stop_reason == "age"
    assert "age" not in output.text


def test_logprobs_are_those_of_the_model(llm):
    output = generate(llm, {"choice": ["xyz"]}, logprobs=2)

    first = output.logprobs[0]
    assert first.rank > 1
    assert first.logprob < first.top_logprobs[0][1]


def test_wrong_grammar_of_one_prompt_is_refused_with_its_field(llm):
    params = [SamplingParams(), SamplingParams(structured_outputs={"regex": "(a"})]

    with pytest.raises(RequestError, match="prompt 1: regex cannot be compiled") as refused:
        llm.generate([PROMPT, PROMPT], params)

    assert refused.value.param == "structured_outputs.regex"
    assert not llm.engine.has_work


def test_completions_have_matchers_of_their_own(llm):
    output = generate(llm, COMPACT, n=4, temperature=1.0, seed=5)

    texts = [choice.text for choice in output.choices]
    for text in texts:
        jsonschema.validate(json.loads(text), PERSON)
    assert len(set(texts)) > 1
    alone = [generate(llm, COMPACT, temperature=1.0, seed=5 + i).text for i in range(4)]
    assert texts == alone


def test_beams_match_the_grammar(llm):
    output = generate(llm, COMPACT, n=3, use_beam_search=True, beam_width=4)

    for choice in output.choices:
        jsonschema.validate(json.loads(choice.text), PERSON)
    assert output.choices[0].score >= output.choices[1].score
    greedy = generate(llm, COMPACT, use_beam_search=True, beam_width=1)
    assert greedy.text == generate(llm, COMPACT).text


def test_other_requests_of_a_batch_do_not_change(llm):
    plain = SamplingParams(max_tokens=12)
    structured = SamplingParams(max_tokens=40, structured_outputs=COMPACT)
    alone = [llm.generate(PROMPT, params)[0].text for params in (plain, structured)]

    both = llm.generate([PROMPT, PROMPT], [plain, structured])

    assert [output.text for output in both] == alone


def test_grammar_that_cannot_continue_ends_only_its_request(llm, monkeypatch):
    monkeypatch.setitem(grammar.LIMITS, "step_max_items", 60)
    wanted = {"grammar": 'start: e\ne: e e | "a" | e e e'}
    params = [
        SamplingParams(max_tokens=200, structured_outputs=wanted, ignore_eos=True),
        SamplingParams(max_tokens=200, ignore_eos=True),
    ]

    failed, other = llm.generate([PROMPT, PROMPT], params)

    assert failed.finish_reason == "error"
    assert "structured_outputs cannot continue" in failed.error
    assert len(other.token_ids) == 200


@pytest.mark.parametrize("preempt", ["recompute", "swap"])
def test_preempted_outputs_are_equal(llm, preempt):
    many = {"json": {"type": "array", "items": PERSON, "minItems": 2, "maxItems": 2}}
    options = {"temperature": 1.0, "max_tokens": 64, "structured_outputs": many}
    params = [SamplingParams(seed=seed, n=1 + seed % 2, **options) for seed in range(4)]
    expected = [o for p in params for o in llm.generate(PROMPT, p)]
    space = "4MiB" if preempt == "swap" else None
    small = LLM(
        llm.model,
        kv=KVConfig(memory="768KiB", swap_space=space),
        schedule=ScheduleConfig(preempt=preempt, admission="optimistic"),
    )

    outputs = small.generate([PROMPT] * len(params), params)

    assert small.stats().num_preemptions > 0
    assert [[c.token_ids for c in o.choices] for o in outputs] == [
        [c.token_ids for c in o.choices] for o in expected
    ]


def test_async_stream_is_the_whole_output(llm):
    params = SamplingParams(max_tokens=64, structured_outputs=COMPACT)
    expected = llm.generate(PROMPT, params)[0].text

    async def main():
        async with AsyncLLM(llm.engine) as engine:
            return [delta async for delta in engine.stream(PROMPT, params)]

    deltas = asyncio.run(main())

    assert "".join(delta.text for delta in deltas) == expected
    assert deltas[-1].finish_reason == "stop"


def test_async_refuses_a_wrong_grammar(llm):
    async def main():
        async with AsyncLLM(llm.engine) as engine:
            await engine.generate(PROMPT, SamplingParams(structured_outputs={"regex": "(a"}))

    with pytest.raises(RequestError, match="unclosed") as refused:
        asyncio.run(main())

    assert refused.value.param == "structured_outputs.regex"
    assert not llm.engine.has_work


# ---- random schemas ------------------------------------------------------------------------------

NAMES = st.text("abcxyz_", min_size=1, max_size=4)
LEAVES = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(
        lambda low, span: {"type": "integer", "minimum": low, "maximum": low + span},
        st.integers(-20, 20),
        st.integers(0, 50),
    ),
    st.builds(
        lambda low, span: {"type": "string", "minLength": low, "maxLength": low + span},
        st.integers(0, 2),
        st.integers(0, 3),
    ),
    st.builds(lambda texts: {"enum": texts}, st.lists(NAMES, min_size=1, max_size=3, unique=True)),
    st.builds(lambda value: {"const": value}, st.one_of(NAMES, st.integers(0, 9), st.booleans())),
)


def _object(properties, optional):
    required = [name for name in properties if name not in optional]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _around(inner):
    objects = st.dictionaries(NAMES, inner, max_size=3).flatmap(
        lambda found: st.builds(_object, st.just(found), st.sets(st.sampled_from([*found, ""])))
    )
    arrays = st.builds(
        lambda items, low, span: {
            "type": "array",
            "items": items,
            "minItems": low,
            "maxItems": low + span,
        },
        inner,
        st.integers(0, 2),
        st.integers(0, 1),
    )
    return st.one_of(objects, arrays, st.builds(lambda a, b: {"anyOf": [a, b]}, inner, inner))


SCHEMAS = st.recursive(LEAVES, _around, max_leaves=5)


@given(schema=SCHEMAS, seed=st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_output_of_a_random_schema_validates(llm, schema, seed):
    wanted = {"json": schema, "whitespace_pattern": " "}

    output = generate(llm, wanted, temperature=1.5, seed=seed, max_tokens=400)

    assert output.finish_reason == "stop"
    jsonschema.validate(json.loads(output.text), schema)
