"""The application: routes over one engine."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from anyio import to_thread
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from isobit.engine.request import PromptProgress
from isobit.errors import IsobitError, RequestError
from isobit.serve.body import read_json
from isobit.serve.errors import CLIENT_CLOSED, ApiError, short
from isobit.serve.metrics import Metrics
from isobit.serve.replies import RETRY_SECONDS, Delta, End, Replies, Running
from isobit.serve.schema import ChatRequest, Common, parse_chat, parse_completion
from isobit.serve.shapes import ChatShape, CompletionShape, Shape
from isobit.serve.text import ReplyText

if TYPE_CHECKING:
    from isobit.engine.engine import Engine

STOPPING = "the server is stopping: send the request to another one, or again when it is back"
ROUTES = ("/v1/models", "/v1/chat/completions", "/v1/completions", "/health", "/metrics")


@dataclass(frozen=True)
class ServerOptions:
    """What the routes need to know. max_tokens: the reply limit of requests that name none; None = the context."""

    name: str
    max_tokens: int | None
    body_limit: int


@dataclass(frozen=True)
class Job:
    """A request that is ready to run, and how to send what comes of it."""

    running: Running
    text: ReplyText
    shape: Shape
    stream: bool
    include_usage: bool


class Service:
    """The routes' common work: from a parsed request to a response."""

    def __init__(self, engine: "Engine", options: ServerOptions):
        self.engine = engine
        self.options = options
        self.origin = engine.origin
        self.started = int(time.time())
        self.stopping = False
        self.metrics = Metrics(engine.status)
        self.replies = Replies(engine, self.metrics)

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self._serve(request, parse_chat)

    async def complete(self, request: Request) -> Response:
        """POST /v1/completions."""
        return await self._serve(request, parse_completion)

    def models(self) -> dict[str, Any]:
        """GET /v1/models."""
        return {"object": "list", "data": [self.model(self.options.name)]}

    def model(self, name: str) -> dict[str, Any]:
        """GET /v1/models/NAME."""
        self._check_model(name)
        return {
            "id": name,
            "object": "model",
            "created": self.started,
            "owned_by": "isobit",
            "max_model_len": self.engine.context,
        }

    def health(self) -> Response:
        """GET /health: 200, or 503 once the server is stopping, or while the checkpoint cannot be read any more."""
        status = self.engine.status()
        content = {
            "status": "stopping" if self.stopping else "ok" if status.problem is None else "failing",
            "model": self.options.name,
            "lanes": status.lanes,
            "running": status.running,
            "queued": status.queued,
        }
        if status.problem is not None:
            content["problem"] = status.problem
        return JSONResponse(content, status_code=200 if content["status"] == "ok" else 503)

    async def _serve(self, request: Request, parse: Callable[[dict[str, Any]], Common]) -> Response:
        if self.stopping:
            self.metrics.requests.labels("busy").inc()
            raise ApiError(503, STOPPING, code="shutting_down", headers={"Retry-After": str(RETRY_SECONDS)})
        try:
            parsed = parse(await read_json(request, self.options.body_limit))
            self._check_model(parsed.model)
            job = await self._job(parsed)
        except (ApiError, RequestError) as error:
            if not (isinstance(error, ApiError) and error.status == 503):
                self.metrics.requests.labels("refused").inc()
            raise
        if job.stream:
            headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
            return StreamingResponse(self._events(job), media_type="text/event-stream", headers=headers)
        return await self._whole_unless_disconnected(request, job)

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self.options.name:
            message = f"unknown model {short(name)}: this server serves {self.options.name!r}"
            raise ApiError(404, message, "model", "model_not_found")

    async def _job(self, parsed: Common) -> Job:
        tokenizer = self.engine.tokenizer
        prompt = await to_thread.run_sync(parsed.prompt_of, tokenizer)
        asked = parsed.for_engine(prompt, tokenizer.stop_ids, self._reply_limit(parsed, len(prompt.tokens)))
        running = self.replies.submit(asked)
        return Job(
            running=running,
            text=ReplyText(tokenizer.detokenizer(), asked.stop_tokens, parsed.stop),
            shape=(ChatShape if isinstance(parsed, ChatRequest) else CompletionShape)(
                model=self.options.name,
                request=asked,
                origin=self.origin,
                context=self.engine.context,
                with_token_ids=parsed.return_token_ids,
                tokenizer=tokenizer,
            ),
            stream=parsed.stream,
            include_usage=bool(parsed.stream_options and parsed.stream_options.include_usage),
        )

    def _reply_limit(self, parsed: Common, prompt_tokens: int) -> int:
        limits = (parsed.reply_limit, self.options.max_tokens, parsed.route_limit)
        asked = next((limit for limit in limits if limit is not None), self.engine.context)
        return max(1, min(asked, self.engine.context - prompt_tokens))

    async def _whole_unless_disconnected(self, request: Request, job: Job) -> Response:
        reply = asyncio.create_task(self._whole(job))
        gone = asyncio.create_task(_disconnected(request))
        try:
            await asyncio.wait((reply, gone), return_when=asyncio.FIRST_COMPLETED)
            return JSONResponse(reply.result()) if reply.done() else Response(status_code=CLIENT_CLOSED)
        finally:
            reply.cancel()
            gone.cancel()

    async def _whole(self, job: Job) -> dict[str, Any]:
        deltas: list[Delta] = []
        async with aclosing(self.replies.follow(job.running, job.text)) as updates:
            async for update in updates:
                if isinstance(update, Delta):
                    deltas.append(update)
                elif isinstance(update, End):
                    return job.shape.whole(deltas, update)
        raise RuntimeError("the reply has no end")

    async def _events(self, job: Job) -> AsyncIterator[str]:
        """The stream's lines: comments with the prompt's progress, then data."""
        opening = job.shape.opening()
        if opening is not None:
            yield _data(opening)
        try:
            async with aclosing(self.replies.follow(job.running, job.text)) as updates:
                async for update in updates:
                    if isinstance(update, PromptProgress):
                        yield f": prompt {update.done}/{update.total}\n\n"
                    elif isinstance(update, Delta):
                        yield _data(job.shape.chunk(update))
                    else:
                        yield _data(job.shape.last_chunk(update))
                        if job.include_usage:
                            yield _data(job.shape.usage_chunk(update))
        except ApiError as error:
            yield _data(error.body())
        yield "data: [DONE]\n\n"


def create_app(engine: "Engine", options: ServerOptions) -> FastAPI:
    """The ASGI application. `app.state.service` is its Service; the engine is closed when the application ends."""
    service = Service(engine, options)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await to_thread.run_sync(engine.close)

    app = FastAPI(title="isobit", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.service = service
    app.add_api_route("/health", service.health, methods=["GET"], response_model=None)
    app.add_api_route("/v1/models", service.models, methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", service.model, methods=["GET"])
    app.add_api_route("/v1/chat/completions", service.chat, methods=["POST"], response_model=None)
    app.add_api_route("/v1/completions", service.complete, methods=["POST"], response_model=None)

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(service.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(IsobitError)
    async def isobit_error(_: Request, error: IsobitError) -> Response:
        param = error.param if isinstance(error, RequestError) else None
        code = error.code if isinstance(error, RequestError) else None
        status = 400 if isinstance(error, RequestError) else 500
        return ApiError(status, str(error), param, code).response()

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        message = {
            404: f"no route {short(request.url.path)}: expected one of {', '.join(ROUTES)}",
            405: f"{short(request.method)} is not possible on {short(request.url.path)}",
        }.get(error.status_code, str(error.detail))
        return ApiError(error.status_code, message, headers=error.headers).response()

    @app.exception_handler(Exception)
    async def defect(_: Request, error: Exception) -> Response:
        return ApiError(500, f"a defect of isobit: {type(error).__name__}: {error}").response()

    return app


def _data(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False, separators=(',', ':'))}\n\n"


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
