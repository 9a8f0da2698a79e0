"""`isobit serve`: the HTTP server."""

import os
from typing import Annotated

import typer

from isobit import settings
from isobit.cli.common import (
    ContextOption,
    DeviceOption,
    Folder,
    MemoryOption,
    MtpDraftsOption,
    NoDraftsOption,
    SegmentRowsOption,
    ThreadsOption,
    open_engine,
    option,
)
from isobit.errors import IsobitError

STOP_WITH_STDIN = typer.Option("--stop-with-stdin", help="Stop when standard input ends, as a child process should.")


def serve(
    folder: Folder,
    host: Annotated[str, option(settings.HOST)] = settings.HOST.default,
    port: Annotated[int, option(settings.PORT)] = settings.PORT.default,
    name: Annotated[str | None, option(settings.NAME)] = None,
    context: ContextOption = None,
    max_tokens: Annotated[int | None, option(settings.MAX_TOKENS)] = None,
    device: DeviceOption = settings.DEVICE.default,
    memory_gib: MemoryOption = None,
    threads: ThreadsOption = None,
    parallel: Annotated[int | None, option(settings.PARALLEL)] = None,
    segment_rows: SegmentRowsOption = settings.SEGMENT_ROWS.default,
    decode_share: Annotated[int, option(settings.DECODE_SHARE)] = settings.DECODE_SHARE.default,
    mtp_drafts: MtpDraftsOption = settings.MTP_DRAFTS.default,
    no_drafts: NoDraftsOption = settings.NO_DRAFTS.default,
    prompt_cache_gib: Annotated[float, option(settings.PROMPT_CACHE_GIB)] = settings.PROMPT_CACHE_GIB.default,
    host_cache_gib: Annotated[float | None, option(settings.HOST_CACHE_GIB)] = None,
    spill_dir: Annotated[str | None, option(settings.SPILL_DIR)] = None,
    spill_gib: Annotated[float, option(settings.SPILL_GIB)] = settings.SPILL_GIB.default,
    queue: Annotated[int, option(settings.QUEUE)] = settings.QUEUE.default,
    body_mib: Annotated[int, option(settings.BODY_MIB)] = settings.BODY_MIB.default,
    grace: Annotated[float, option(settings.GRACE)] = settings.GRACE.default,
    stop_with_stdin: Annotated[bool, STOP_WITH_STDIN] = False,
) -> None:
    """Serve a checkpoint over HTTP, as OpenAI's API."""
    from isobit.serve import server

    if spill_dir is not None and not prompt_cache_gib:
        raise IsobitError("--spill-dir needs a prompt cache: give --prompt-cache-gib a value above 0")
    if host_cache_gib and not prompt_cache_gib:
        raise IsobitError("--host-cache-gib needs a prompt cache: give --prompt-cache-gib a value above 0")
    with server.bind(host, port) as bound:
        engine = open_engine(
            folder,
            always_tell=True,
            context=context,
            device=device,
            memory_gib=memory_gib,
            segment_rows=segment_rows,
            threads=threads,
            queue=queue,
            parallel=parallel,
            decode_share=decode_share,
            mtp_drafts=mtp_drafts,
            drafts=not no_drafts,
            prompt_cache_gib=prompt_cache_gib,
            host_cache_gib=host_cache_gib,
            spill_dir=spill_dir,
            spill_gib=spill_gib,
        )
        try:
            from isobit.serve.app import ServerOptions, create_app

            # A folder's name may hold bytes that no JSON text can.
            shown_name = os.fsencode(name or engine.name).decode("utf-8", "replace")
            options = ServerOptions(shown_name, max_tokens, body_mib * 2**20)
            url = server.url_of(bound)
            lanes = engine.status().lanes
            shown = f"context {engine.context}, {lanes} at a time"
            ready = f"isobit: serving {options.name} at {url}/v1 ({shown}); Ctrl-C stops"
            server.run(create_app(engine, options), bound, grace, lambda: print(ready, flush=True), stop_with_stdin)
        finally:
            engine.close()
