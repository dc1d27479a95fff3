"""KV event options of commands: events in a file, or published for routers."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.layout.options import option

if TYPE_CHECKING:
    from quire.api.llm import LLM
    from quire.engine.block_events import BlockPublisher, EventFile


def kv_events_option() -> Any:
    """The option --kv-events of a command."""
    return option(
        None,
        help="Append KV events to a file as they occur, one JSON object per line.",
        metavar="FILE.jsonl",
    )


def kv_events_endpoint_option() -> Any:
    """The option --kv-events-endpoint of a command."""
    return option(
        None,
        help="Publish vLLM's KV cache events over ZeroMQ at an address such as tcp://*:5557.",
        metavar="ADDRESS",
    )


@dataclass(frozen=True, slots=True)
class KVWatch:
    """Open listeners of KV events; opened before the model is loaded, so that errors come early."""

    file: "EventFile | None"
    publisher: "BlockPublisher | None"

    def follow(self, llm: "LLM") -> None:
        from quire.engine.block_events import MEDIA, BlockEvents

        if self.file is not None:
            llm.engine.events.subscribe(self.file)
        if self.publisher is not None:
            blocks = BlockEvents(self.publisher, MEDIA[llm.model.decoder.device.type])
            blocks.cleared()
            llm.engine.prefix_events.subscribe(blocks)


@contextmanager
def watching(file: Path | None, endpoint: str | None = None) -> Iterator[KVWatch]:
    """Open the configured listeners, and close them at the end."""
    # imported here: --help does not need the engine
    from quire.engine.block_events import BlockPublisher, EventFile

    with ExitStack() as stack:
        events = None if file is None else stack.enter_context(EventFile(file))
        publisher = None if endpoint is None else BlockPublisher(endpoint)
        if publisher is not None:
            stack.callback(publisher.close)
        yield KVWatch(events, publisher)
