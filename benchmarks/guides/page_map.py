"""Figures of docs/dashboard.md: time of the engine's thread for its views, and their size.

A page map of 256 requests is copied from a KV memory without a model. The pages of the requests are
allocated chunk by chunk, are shared in pairs, or alternate page by page. Then quire-tiny generates,
and the two views of the dashboard's first page are copied between steps. Times are CPU times of the
thread, so that other load on the machine changes them little. The last line of output is one JSON
object.
"""

import json
import statistics
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from time import thread_time

import numpy as np

from quire.api.llm import LLM
from quire.cli.report import envelope
from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.engine.inspection.totals import PageOwners, overview, read_page_map
from quire.kv.memory import KVMemory
from quire.kv.page_map import read_pages
from quire.kv.sharing import fork
from quire.layout.codec_names import codec_spec
from quire.layout.pages import CacheLayout, LaneGroup, kv_pages

PAGE_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PageMapConfig:
    """Configuration of all measurements.

    Attributes:
        requests: requests whose pages are mapped.
        pages: pages of the memory; the requests hold all except one in 32.
        chunk_pages: neighbouring pages of a chunk of a prompt; the last quarter of a request's
            pages is allocated page by page, as in decode.
        repeats: copies of each map.
        engine_requests: requests of quire-tiny, whose KV memory they fill.
        engine_views: views of that engine, one in each step.
    """

    requests: int = 256
    pages: int = 100_000
    chunk_pages: int = 32
    repeats: int = 21
    engine_requests: int = 22
    engine_views: int = 60

    @property
    def pages_each(self) -> int:
        """Pages of one request."""
        return (self.pages - self.pages // 32) // self.requests


QUICK_PAGE_MAP = PageMapConfig(
    requests=8, pages=256, chunk_pages=4, repeats=3, engine_requests=3, engine_views=3
)


@dataclass(frozen=True, slots=True)
class MapFound:
    """The map of one memory.

    Attributes:
        copy_s: CPU seconds of each copy in the engine's thread.
        body_bytes: bytes of its JSON.
    """

    copy_s: list[float]
    body_bytes: int


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all maps and the views of an engine, and print the claims."""
    quick = _parse(arguments).quick
    config = QUICK_PAGE_MAP if quick else PageMapConfig()
    found = {
        "chunks": measured(config, in_chunks(config)),
        "shared": measured(config, shared_in_pairs(config)),
        "alternating": measured(config, alternating(config)),
    }
    refresh_s = view_seconds(config)
    claims: dict[str, int | float] = {}
    for name, one in found.items():
        claims[f"{name}_copy_s"] = statistics.median(one.copy_s)
        claims[f"{name}_body_bytes"] = one.body_bytes
    claims["overview_refresh_s"] = statistics.median(refresh_s)
    arms = {name: asdict(one) for name, one in found.items()} | {"overview_refresh_s": refresh_s}
    print(json.dumps(envelope("page map", claims, arms, asdict(config), quick=quick)))


# ---- memories ------------------------------------------------------------------------------------


def in_chunks(config: PageMapConfig) -> KVMemory:
    """Prompts prefilled in chunks, request after request, then pages of decode in turn."""
    memory, rows = _memory(config), range(config.requests)
    decoded = config.pages_each // 4
    _grow_in_chunks(memory, rows, config.pages_each - decoded, config.chunk_pages)
    for _ in range(decoded):
        _grow(memory, rows, 1)
    return memory


def alternating(config: PageMapConfig) -> KVMemory:
    """Requests that allocate page by page in turn."""
    memory = _memory(config)
    for _ in range(config.pages_each):
        _grow(memory, range(config.requests), 1)
    return memory


def shared_in_pairs(config: PageMapConfig) -> KVMemory:
    """Pairs of requests that share half of their pages: a pair holds three halves."""
    pairs, half = config.requests // 2, 2 * config.pages_each // 3
    memory = _memory(config, started=pairs)
    _grow_in_chunks(memory, range(pairs), half, config.chunk_pages)
    for row in range(pairs):
        fork(memory, row)
    _grow_in_chunks(memory, range(config.requests), half, config.chunk_pages)
    return memory


def _grow_in_chunks(memory: KVMemory, rows: Iterable[int], pages: int, chunk: int) -> None:
    """Allocate this number of pages for each row, one chunk of each row after the other."""
    held = [*rows]
    for first in range(0, pages, chunk):
        for row in held:
            _grow(memory, [row], min(chunk, pages - first))


def _memory(config: PageMapConfig, started: int | None = None) -> KVMemory:
    """A memory of this number of pages, and requests without tokens in the rows from 0 on."""
    one = kv_pages(
        key=codec_spec("bfloat16"),
        value=codec_spec("bfloat16"),
        heads=1,
        head_dim=8,
        tokens=PAGE_TOKENS,
    )
    layout = CacheLayout((LaneGroup(name="full", page_class=one, layers=(0,)),))
    memory = KVMemory(layout, config.pages * one.page_bytes, max_rows=config.requests)
    for _ in range(config.requests if started is None else started):
        memory.start()
    return memory


def _grow(memory: KVMemory, rows: Iterable[int], pages: int) -> None:
    held = np.array([*rows])
    memory.grow(held, np.full(len(held), pages * PAGE_TOKENS, dtype=np.int32))


# ---- measurements --------------------------------------------------------------------------------


def measured(config: PageMapConfig, memory: KVMemory) -> MapFound:
    """Copy the map several times, and encode it once."""
    rows = range(config.requests)
    copies = [timed(lambda: read_pages(memory, rows)) for _ in range(config.repeats + 1)]
    owners = [
        {"kind": "request", "request_id": f"cmpl-{row:032x}", "tenant": "default"} for row in rows
    ]
    encoded = PageOwners(read_pages(memory, rows), owners, [["full"]], {}).encode()
    body = json.dumps(encoded, separators=(",", ":"))
    return MapFound(copies[1:], len(body.encode()))


def view_seconds(config: PageMapConfig) -> list[float]:
    """CPU seconds of the views that the dashboard's first page requests every second."""
    llm = LLM("quire-tiny", kv=KVConfig(memory="4MiB", swap_space="3MiB"), verify=False)
    engine = llm.engine
    sampling = SamplingParams(max_tokens=config.engine_views + 8, temperature=0.9, ignore_eos=True)
    for number in range(config.engine_requests):
        prompt = [100 + (number + place) % 800 for place in range(32)]
        engine.submit(GenerationRequest(prompt, sampling))
    for _ in range(4):
        engine.step()
    found = [_view_seconds(engine) for _ in range(config.engine_views)]
    while engine.has_work:
        engine.step()
    return found


def _view_seconds(engine: Engine) -> float:
    engine.step()
    return timed(lambda: (overview(engine, None), read_page_map(engine, None)))


def timed(read: Callable[[], object]) -> float:
    """CPU seconds of a call in this thread."""
    started_s = thread_time()
    read()
    return thread_time() - started_s


def _parse(arguments: Sequence[str] | None) -> Namespace:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small memories, no claims")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
