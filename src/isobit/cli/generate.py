"""`isobit generate`: one reply, streamed to the terminal."""

import json
import os
import secrets
import sys
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isobit import settings
from isobit.cli.common import (
    ContextOption,
    DeviceOption,
    Folder,
    Json,
    MemoryOption,
    MtpDraftsOption,
    NoDraftsOption,
    ProfileOption,
    ThreadsOption,
    follow,
    open_engine,
    option,
    printable,
)
from isobit.cli.profile import print_profile, profile_of, start_over
from isobit.errors import IsobitError

if TYPE_CHECKING:
    from isobit.checkpoint.tokenizer import Tokenizer
    from isobit.engine.engine import Engine
    from isobit.engine.origin import Origin
    from isobit.engine.request import Finished, Request

WARM_UP_TOKENS = 8  # of the reply before a profile, whose first calls load kernels

PromptArgument = Annotated[
    str, typer.Argument(help="The prompt; - reads it from standard input, line ends and all.", show_default=False)
]
ChatOption = Annotated[
    bool, typer.Option("--chat/--raw", help="Wrap the prompt in the chat template, or take it as it is.")
]
SystemOption = Annotated[str | None, typer.Option("--system", help="System message of the chat.", show_default=False)]
IgnoreEndOption = Annotated[bool, typer.Option("--ignore-eos", help="Go on past end tokens, up to --max-tokens.")]


def generate(
    folder: Folder,
    prompt: PromptArgument,
    max_tokens: Annotated[int, option(settings.REPLY_TOKENS)] = settings.REPLY_TOKENS.default,
    temperature: Annotated[float, option(settings.TEMPERATURE)] = settings.TEMPERATURE.default,
    top_k: Annotated[int, option(settings.TOP_K)] = settings.TOP_K.default,
    top_p: Annotated[float, option(settings.TOP_P)] = settings.TOP_P.default,
    min_p: Annotated[float, option(settings.MIN_P)] = settings.MIN_P.default,
    seed: Annotated[int | None, option(settings.SEED)] = None,
    prefill: Annotated[str, option(settings.PREFILL)] = settings.PREFILL.default,
    segment_rows: Annotated[int | None, option(settings.REQUEST_SEGMENT_ROWS)] = None,
    chat: ChatOption = True,
    system: SystemOption = None,
    ignore_eos: IgnoreEndOption = False,
    context: ContextOption = None,
    device: DeviceOption = settings.DEVICE.default,
    memory_gib: MemoryOption = None,
    threads: ThreadsOption = None,
    mtp_drafts: MtpDraftsOption = settings.MTP_DRAFTS.default,
    no_drafts: NoDraftsOption = settings.NO_DRAFTS.default,
    profile: ProfileOption = settings.PROFILE.default,
    as_json: Json = False,
) -> None:
    """Write one reply to the terminal."""
    text = (
        _utf8(sys.stdin.buffer.read(), "standard input") if prompt == "-" else _utf8(os.fsencode(prompt), "the prompt")
    )
    if system is not None:
        system = _utf8(os.fsencode(system), "--system")
    if system is not None and not chat:
        raise IsobitError("--system needs the chat template: leave out --raw")
    engine = open_engine(
        folder,
        context=context,
        device=device,
        memory_gib=memory_gib,
        segment_rows=segment_rows,
        threads=threads,
        mtp_drafts=mtp_drafts,
        drafts=not no_drafts,
        profile=profile,
    )
    try:
        from isobit.engine.request import Request, Sampling

        # Before anyone replaces the files that were loaded.
        origin = engine.origin if as_json else None
        chosen = secrets.randbits(53) if seed is None else seed % settings.SEED_LIMIT
        tokenizer = engine.tokenizer
        tokens = tuple(_chat_tokens(tokenizer, text, system) if chat else tokenizer.encode(text))
        request = Request(
            tokens=tokens,
            max_tokens=max(1, min(max_tokens, engine.context - len(tokens))),
            sampling=Sampling(temperature, top_k, top_p, min_p, chosen),
            stop_tokens=frozenset() if ignore_eos else tokenizer.stop_ids,
            prefill=prefill,  # type: ignore[arg-type]
            segment_rows=segment_rows,
        )
        if profile:
            _reply(engine, replace(request, max_tokens=min(request.max_tokens or 1, WARM_UP_TOKENS)), show=False)
            start_over(engine)
        reply, finished = _reply(engine, request, show=not as_json)
    finally:
        engine.close()
    timed = profile_of(engine)
    if origin is not None:
        described = _described(engine, origin, request, reply, finished)
        print(json.dumps(described if timed is None else {**described, "profile": timed}))
    else:
        _say_what_else(finished, chosen if seed is None and temperature else None)
        print_profile(timed, to_stderr=True)


def _say_what_else(finished: "Finished", drawn_seed: int | None) -> None:
    """What is no part of the reply, on standard error. drawn_seed: of a reply that nobody chose the seed of."""
    if finished.notice:
        print(f"isobit: {finished.notice}", file=sys.stderr)
    if drawn_seed is not None:
        print(f"isobit: --seed {drawn_seed} gives this reply again", file=sys.stderr)


def _chat_tokens(tokenizer: "Tokenizer", text: str, system: str | None) -> list[int]:
    messages = [{"role": "user", "content": text}]
    return tokenizer.chat([{"role": "system", "content": system}, *messages] if system is not None else messages)


def _reply(engine: "Engine", request: "Request", show: bool) -> tuple[str, "Finished"]:
    """The reply's text and end; written to standard output as it comes if `show`."""
    from isobit.engine.request import Finished, TokenEvent
    from isobit.serve.text import ReplyText

    text = ReplyText(engine.tokenizer.detokenizer(), request.stop_tokens)
    pieces: list[str] = []

    def add(piece: str) -> None:
        pieces.append(piece)
        if show and piece:
            print(printable(piece) if sys.stdout.isatty() else piece, end="", flush=True)

    for event in follow(engine, request):
        if isinstance(event, TokenEvent):
            add(text.push(event.token))
        elif isinstance(event, Finished):
            add(text.finish())
            if show:
                print(flush=True)
            if event.error is not None:
                raise IsobitError(f"the reply could not be computed: {event.error}")
            return "".join(pieces), event
    raise RuntimeError("the engine did not end the request")


def _described(
    engine: "Engine", origin: "Origin", request: "Request", text: str, finished: "Finished"
) -> dict[str, Any]:
    """What --json prints: the request as a server's /v1/completions takes it, and its reply."""
    from isobit.serve.receipts import receipt_of

    asked = {"prompt": list(request.tokens), "max_tokens": request.max_tokens, **asdict(request.sampling)}
    return {
        "request": {**asked, "ignore_eos": not request.stop_tokens},
        "text": text,
        "tokens": list(finished.tokens),
        "token_hash": finished.token_hash,
        "logits_hash": finished.logits_hash,
        "finish_reason": finished.reason,
        "seed": request.sampling.seed,
        "prompt_tokens": len(request.tokens),
        "prefill": finished.prefill,
        "segment_rows": finished.segment_rows,
        "rows_computed": finished.rows_computed,
        "rows_reused": finished.rows_reused,
        "drafted": finished.drafted,
        "accepted": finished.accepted,
        "timings": asdict(finished.timings),
        "notice": finished.notice,
        "receipt": receipt_of(origin, request, len(finished.tokens), engine.context).as_dict(),
        "folder": str(engine.folder),
    }


def _utf8(data: bytes, what: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise IsobitError(f"{what} is not valid UTF-8 at byte {error.start}: expected UTF-8 text") from None
