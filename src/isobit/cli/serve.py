"""`isobit serve`: the HTTP server."""

from typing import Annotated

import typer

from isobit import settings
from isobit.cli.common import (
    ContextOption,
    Folder,
    MemoryOption,
    SegmentRowsOption,
    ThreadsOption,
    open_engine,
    option,
)

STOP_WITH_STDIN = typer.Option("--stop-with-stdin", help="Stop when standard input ends, as a child process should.")


def serve(
    folder: Folder,
    host: Annotated[str, option(settings.HOST)] = settings.HOST.default,
    port: Annotated[int, option(settings.PORT)] = settings.PORT.default,
    name: Annotated[str | None, option(settings.NAME)] = None,
    context: ContextOption = None,
    max_tokens: Annotated[int | None, option(settings.MAX_TOKENS)] = None,
    memory_gib: MemoryOption = None,
    threads: ThreadsOption = None,
    segment_rows: SegmentRowsOption = settings.SEGMENT_ROWS.default,
    queue: Annotated[int, option(settings.QUEUE)] = settings.QUEUE.default,
    body_mib: Annotated[int, option(settings.BODY_MIB)] = settings.BODY_MIB.default,
    grace: Annotated[float, option(settings.GRACE)] = settings.GRACE.default,
    stop_with_stdin: Annotated[bool, STOP_WITH_STDIN] = False,
) -> None:
    """Serve a checkpoint over HTTP, as OpenAI's API."""
    from isobit.serve import server

    with server.bind(host, port) as bound:
        engine = open_engine(folder, context, memory_gib, segment_rows, threads, queue)
        try:
            from isobit.serve.app import ServerOptions, create_app

            options = ServerOptions(name or engine.name, max_tokens, body_mib * 2**20)
            url = server.url_of(bound)
            ready = f"isobit: serving {options.name} at {url}/v1 (context {engine.context}); Ctrl-C stops"
            server.run(create_app(engine, options), bound, grace, lambda: print(ready, flush=True), stop_with_stdin)
        finally:
            engine.close()
