"""Two engines in threads over one store: what the first prefills, the second does not compute."""

import asyncio

import pytest

from quire import GenerationRequest, SamplingParams
from quire.api.async_llm import AsyncLLM
from reference.test_prefix_tier import PROMPTS, engine_of, plain
from support.engines import greedy
from support.redis_servers import start_redis


@pytest.fixture
def server():
    started = start_redis()
    yield started
    started.close()


def test_an_engine_in_a_thread_decodes_what_another_one_has_prefilled(server):
    """As behind `quire serve`: the first token of one engine, then the whole output of another."""

    async def run():
        prefill = AsyncLLM(engine_of("qwen3", remote=server.url, kv_write="through"))
        decode = AsyncLLM(engine_of("qwen3", remote=server.url, kv_load="whole"))
        async with prefill, decode:
            first = await prefill.generate(PROMPTS["b"], SamplingParams(max_tokens=1))
            await prefill.inspect(lambda engine: engine.flush_kv())
            return first, await decode.generate(GenerationRequest(PROMPTS["b"], greedy(6)))

    first, found = asyncio.run(run())
    assert first.usage.cached_tokens == 0
    assert found.usage.cached_tokens == 148
    assert len(found.token_ids) == len(plain("qwen3")["b"])
