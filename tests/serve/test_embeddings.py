"""POST /v1/embeddings: OpenAI's format, through the engine's scheduler."""

import base64

import numpy as np
import pytest
import torch

from serve.conftest import refused

PATH = "/v1/embeddings"
TEXTS = ["<|doc|>Once upon a time", "<|doc|>The king"]


@pytest.fixture
def embed(post):
    """The body of a response that must succeed."""

    def send(**body):
        response = post(PATH, **body)
        assert response.status_code == 200, response.text
        return response.json()

    return send


def vectors(body):
    return [one["embedding"] for one in body["data"]]


def test_embeddings_equal_normalized_hidden_states_of_transformers(llm, embed):
    body = embed(input=TEXTS, model="quire-tiny")

    assert body["object"] == "list"
    assert [one["index"] for one in body["data"]] == [0, 1]
    lengths = [len(llm.encode(text)) for text in TEXTS]
    assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] == sum(lengths)
    for text, vector in zip(TEXTS, vectors(body), strict=True):
        states = _hidden_states(llm, text)
        assert np.allclose(vector, states / np.linalg.norm(states), atol=2e-4)


def _hidden_states(llm, text):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(llm.model.folder, dtype=torch.float32)
    with torch.inference_mode():
        found = model(torch.tensor([llm.encode(text)]), output_hidden_states=True)
    return found.hidden_states[-1][0, -1].numpy()


@pytest.mark.parametrize("form", ["text", "texts", "ids", "lists of ids"])
def test_all_forms_of_input_give_the_same_embedding(llm, embed, form):
    ids = llm.encode(TEXTS[0])
    forms = {"text": TEXTS[0], "texts": [TEXTS[0]], "ids": ids, "lists of ids": [ids]}

    [vector] = vectors(embed(input=forms[form]))

    assert np.allclose(vector, vectors(embed(input=TEXTS[0]))[0], atol=1e-6)
    assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-6)


def test_base64_has_the_same_float32_values(embed):
    [coded] = vectors(embed(input=TEXTS[0], encoding_format="base64"))

    plain = vectors(embed(input=TEXTS[0]))[0]
    assert np.frombuffer(base64.b64decode(coded), dtype="<f4").tolist() == plain


def test_mean_pooling_without_normalization_differs(embed):
    mean = vectors(embed(input=TEXTS[0], pooling="mean", normalize=False))[0]

    last = vectors(embed(input=TEXTS[0]))[0]
    assert not np.allclose(np.array(mean) / np.linalg.norm(mean), last, atol=1e-3)
    assert np.linalg.norm(mean) != pytest.approx(1, abs=1e-3)


def test_a_truncated_input_equals_the_embedding_of_its_last_tokens(llm, embed):
    ids = llm.encode(TEXTS[0])

    cut = vectors(embed(input=TEXTS[0], truncate_prompt_tokens=3))[0]

    assert np.allclose(cut, vectors(embed(input=ids[-3:]))[0], atol=1e-6)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [1, "a"]}, "input"),
        ({"input": [10**6]}, "input"),
        ({"input": [1] * 5000}, "input"),
        ({"input": "a", "dimensions": 7}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "pooling": "cls"}, "pooling"),
        ({"input": "a", "max_tokens": 5}, "max_tokens"),
        ({"input": "a", "priority": True}, "priority"),
        ({"input": "a", "deadline_s": -1}, "deadline_s"),
        ({"input": "a", "evict": "nothing"}, "evict"),
    ],
)
def test_an_invalid_body_is_refused_with_the_name_of_the_field(post, body, param):
    refused(post(PATH, **body), param)


def test_the_size_of_the_hidden_states_is_accepted_as_dimensions(llm, embed):
    size = llm.model.spec.hidden_size

    assert len(vectors(embed(input="a", dimensions=size))[0]) == size


def test_wrong_dimensions_are_refused_before_the_model_runs(llm, post):
    computed = llm.engine.stats().num_processed_tokens

    message = refused(post(PATH, input=[[5] * 300], dimensions=7), "dimensions")

    assert "expected `dimensions` of" in message
    assert llm.engine.stats().num_processed_tokens == computed


def test_another_model_is_not_found(post):
    assert post(PATH, input="a", model="text-embedding-3-small").status_code == 404


def test_metrics_count_the_prompt_tokens_of_embeddings(serve):
    async def main(client):
        await client.post(PATH, json={"input": TEXTS})
        return (await client.get("/metrics")).text

    text = serve(main)

    found = [line for line in text.splitlines() if line.startswith("quire_prompt_tokens_total")]
    assert sum(float(line.split()[-1]) for line in found) > 0
