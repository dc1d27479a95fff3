import asyncio
from typing import Literal

from checks import MODEL, PROMPT, URL, check, run
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

API = {"base_url": f"{URL}/v1", "api_key": "none", "model": MODEL, "temperature": 0}
chat = ChatOpenAI(max_tokens=600, **API)  # quire-tiny fills structures with white space
short = ChatOpenAI(max_tokens=8, **API)


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=16)
    age: int = Field(ge=0, le=120)
    role: Literal["king", "queen"]


@tool
def weather(city: Literal["Oslo", "Rome"]) -> str:
    """The weather of a city."""
    return f"rain in {city}"


@check
def invoke_and_stream() -> None:
    message = short.invoke("The king said")
    chunks = list(short.stream("The king said", stream_usage=True))
    assert "".join(chunk.content for chunk in chunks) == message.content
    assert message.usage_metadata["output_tokens"] == 8
    assert any((chunk.usage_metadata or {}).get("output_tokens") == 8 for chunk in chunks)


@check
def chains_batches_and_async() -> None:
    chain = ChatPromptTemplate.from_messages([("human", "{text}")]) | short | StrOutputParser()
    texts = chain.batch([{"text": "The sea"}, {"text": "The king said"}])
    assert texts[1] == asyncio.run(chain.ainvoke({"text": "The king said"}))


@check
def completions() -> None:
    llm = OpenAI(max_tokens=6, **API)
    assert all(llm.batch([PROMPT, "<|doc|>The sea"]))


@check
def structured_output_by_schema() -> None:
    found = chat.with_structured_output(Person, method="json_schema").invoke("Describe the king.")
    assert isinstance(found, Person)


@check
def structured_output_by_function() -> None:
    found = chat.with_structured_output(Person, method="function_calling").invoke("Describe him.")
    assert isinstance(found, Person)


@check
def structured_output_with_raw_message() -> None:
    structured = chat.with_structured_output(Person, include_raw=True)
    found = structured.invoke("Describe the queen.")
    assert found["parsing_error"] is None
    assert isinstance(found["parsed"], Person)


@check
def bound_tool_is_called() -> None:
    for choice in ("any", "weather"):
        message = chat.bind_tools([weather], tool_choice=choice).invoke("How is the weather?")
        [call] = message.tool_calls[:1]
        assert call["name"] == "weather"
        assert weather.invoke(call["args"]).startswith("rain in ")


@check
def bound_tool_with_automatic_choice() -> None:
    message = short.bind_tools([weather]).invoke("How is the weather?")
    assert isinstance(message, AIMessage)


@check
def answer_of_a_tool_is_read() -> None:
    call = {"name": "weather", "args": {"city": "Oslo"}, "id": "call_1", "type": "tool_call"}
    messages = [
        HumanMessage("How is the weather?"),
        AIMessage("", tool_calls=[call]),
        ToolMessage("rain", tool_call_id="call_1"),
    ]
    assert short.bind_tools([weather]).invoke(messages).usage_metadata["output_tokens"] > 0


run()
