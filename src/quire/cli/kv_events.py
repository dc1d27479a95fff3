"""KV events for whoever watches a command: into a file, or published for routers."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from quire.api.llm import LLM
    from quire.engine.block_events import BlockPublisher
    from quire.engine.event_file import EventFile

KVEventsFile = Annotated[
    Path | None,
    typer.Option(
        "--kv-events",
        metavar="FILE.jsonl",
        help="Append what happens to KV, one JSON object a line, as it happens.",
        show_default=False,
        hidden=True,
    ),
]
KVEventsEndpoint = Annotated[
    str | None,
    typer.Option(
        "--kv-events-endpoint",
        metavar="ADDRESS",
        help="Publish cached blocks over ZeroMQ as vLLM does, at an address such as tcp://*:5557.",
        show_default=False,
        hidden=True,
    ),
]


@dataclass(frozen=True, slots=True)
class KVWatch:
    """Who watches: open before a model is loaded, so that a wrong place is refused at once."""

    file: "EventFile | None"
    publisher: "BlockPublisher | None"

    def follow(self, llm: "LLM") -> None:
        """Hear of everything from now on."""
        from quire.engine.block_events import MEDIA, BlockEvents

        if self.file is not None:
            llm.engine.events.subscribe(self.file)
        if self.publisher is not None:
            blocks = BlockEvents(self.publisher, MEDIA[llm.model.decoder.device.type])
            blocks.cleared()
            llm.engine.prefix_events.subscribe(blocks)


@contextmanager
def watching(file: Path | None, endpoint: str | None = None) -> Iterator[KVWatch]:
    """Open what was asked for, and close it at the end.

    Args:
        file: for all events; None for no file.
        endpoint: to publish cached blocks at; None to publish nothing.

    Raises:
        ConfigError: the file cannot be written, or nobody can listen at the endpoint.
    """
    # loaded here: nothing of the engine is needed for --help
    from quire.engine.block_events import BlockPublisher
    from quire.engine.event_file import EventFile

    with ExitStack() as stack:
        events = None if file is None else stack.enter_context(EventFile(file))
        publisher = None if endpoint is None else BlockPublisher(endpoint)
        if publisher is not None:
            stack.callback(publisher.close)
        yield KVWatch(events, publisher)
