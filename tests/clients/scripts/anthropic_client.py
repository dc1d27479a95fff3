import anthropic
from checks import MESSAGES, MODEL, URL, check, run

client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
OPTIONS = {"model": MODEL, "messages": MESSAGES}
GREEDY = {"extra_body": {"temperature": 0}}


@check
def message_and_stream() -> None:
    whole = client.messages.create(max_tokens=8, **GREEDY, **OPTIONS)
    with client.messages.stream(max_tokens=8, **GREEDY, **OPTIONS) as stream:
        text = "".join(stream.text_stream)
    assert text == whole.content[0].text
    assert whole.usage.output_tokens == 8


@check
def count_tokens() -> None:
    assert client.messages.count_tokens(**OPTIONS).input_tokens > 3


@check
def tools() -> None:
    found = client.messages.create(
        max_tokens=600,
        tools=[{"name": "weather", "input_schema": SCHEMA}],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        **GREEDY,
        **OPTIONS,
    )
    assert found.stop_reason == "tool_use"
    assert found.content[-1].input["city"] in ("Oslo", "Rome")


@check
def errors() -> None:
    try:
        client.messages.create(max_tokens=0, **OPTIONS)
    except anthropic.BadRequestError as raised:
        kind = raised.body["error"]["type"]
    assert kind == "invalid_request_error"


run()
