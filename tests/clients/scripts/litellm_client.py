import asyncio
import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # no download

import litellm
from checks import MESSAGES, PROMPT, URL, check, run

API = {"api_base": f"{URL}/v1", "api_key": "none", "temperature": 0}
CHAT = {"model": "hosted_vllm/quire-tiny", "messages": MESSAGES, **API}
SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["age"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "age_of", "parameters": SCHEMA}}


@check
def chat_and_stream() -> None:
    whole = litellm.completion(max_tokens=8, **CHAT)
    parts = litellm.completion(max_tokens=8, stream=True, **CHAT)
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert text == whole.choices[0].message.content
    assert whole.usage.completion_tokens == 8


@check
def async_chats() -> None:
    async def several() -> list[object]:
        return await asyncio.gather(*(litellm.acompletion(max_tokens=4, **CHAT) for _ in range(5)))

    texts = {found.choices[0].message.content for found in asyncio.run(several())}
    assert len(texts) == 1


@check
def text_completion() -> None:
    found = litellm.text_completion(
        model="text-completion-openai/quire-tiny", prompt=PROMPT, max_tokens=6, logprobs=1, **API
    )
    assert found.choices[0].text
    assert found.usage.completion_tokens == 6


@check
def structured_output() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "age", "schema": SCHEMA, "strict": True}}
    found = litellm.completion(
        **CHAT | {"model": "openai/quire-tiny"}, max_tokens=600, response_format=form
    )
    assert 0 <= json.loads(found.choices[0].message.content)["age"] <= 99


@check
def tools() -> None:
    found = litellm.completion(max_tokens=600, tools=[TOOL], tool_choice="required", **CHAT)
    assert found.choices[0].message.tool_calls[0].function.name == "age_of"


@check
def errors() -> None:
    for kind, options in (
        (litellm.BadRequestError, {"top_p": 5}),
        (litellm.NotFoundError, {"model": "hosted_vllm/gpt-9"}),
    ):
        try:
            litellm.completion(**CHAT | options)
        except kind:
            continue
        raise AssertionError(f"{kind.__name__} was not raised")


@check
def messages_api() -> None:
    async def send() -> object:
        return await litellm.anthropic_messages(max_tokens=6, **CHAT)

    assert asyncio.run(send())["content"][0]["text"]


run()
