"""`quire serve`: the OpenAI-compatible server."""

from typing import Annotated

import typer

from quire.cli.settings import Settings, with_settings


@with_settings()
def serve(
    settings: Settings,
    *,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=0, max=65535)] = 8000,
    served_model_name: Annotated[
        str | None, typer.Option(help="Name of the model in requests. Default: the model's own.")
    ] = None,
) -> None:
    """Serve a model over HTTP."""
    # loaded here: the web framework and torch are not needed for --help
    from quire.serve.app import run_server

    run_server(settings.open_llm(), host=host, port=port, served_model_name=served_model_name)
