"""The HTTP side: routes, limits, streams, and clients that go away."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from eval.endpoint.errors import ApiError
from eval.endpoint.replies import Frame, new_id, usage
from eval.endpoint.requests import ChatRequest, CompletionRequest, read
from eval.endpoint.service import Job, Service
from v41flash.errors import InputError
from v41flash.serving.engine import Busy, Progress, Stopped

MAX_BODY_BYTES = 32 << 20
# How often an answer that is not streamed looks whether its client is still there.
_LOOK_EVERY_S = 0.25


class Limits(NamedTuple):
    """What a client may do.

    Attributes:
        body_bytes: of a request at most.
        api_key: that requests must carry as a bearer token; None lets everybody in.
    """

    body_bytes: int = MAX_BODY_BYTES
    api_key: str | None = None


class _Kind(NamedTuple):
    """One kind of completion: how its body is read, what its answers are called."""

    body: type
    jobs: Callable[[Service, Any], list[Job]]
    prefix: str
    whole: str
    chunk: str


_CHAT = _Kind(ChatRequest, Service.chat, "chatcmpl", "chat.completion", "chat.completion.chunk")
_TEXT = _Kind(
    CompletionRequest, Service.completions, "cmpl", "text_completion", "text_completion"
)


def create_app(service: Service, limits: Limits | None = None) -> Starlette:
    """The ASGI application; it closes the service's engine when it shuts down.

    Args:
        service: the model.
        limits: of clients; the defaults when None.
    """
    limits = limits or Limits()

    def guarded(handler: Callable[[HttpRequest], Any]) -> Callable[[HttpRequest], Any]:
        async def checked(request: HttpRequest) -> Response:
            _authorize(request, limits)
            return await handler(request)

        return checked

    def completions(kind: _Kind) -> Callable[[HttpRequest], Any]:
        async def handler(request: HttpRequest) -> Response:
            raw = await _body(request, limits)
            # Reading, encoding and image decoding would hold up everybody else's streams.
            body = await run_in_threadpool(read, raw, kind.body)
            jobs = await run_in_threadpool(kind.jobs, service, body)
            return await _answer(request, service, kind, body, jobs)

        return handler

    async def models(request: HttpRequest) -> Response:
        entry = {"id": service.model, "object": "model", "created": 0, "owned_by": "v41flash"}
        return JSONResponse({"object": "list", "data": [entry]})

    async def model(request: HttpRequest) -> Response:
        service.check_model(request.path_params["name"])
        return JSONResponse(
            {"id": service.model, "object": "model", "created": 0, "owned_by": "v41flash"}
        )

    async def health(request: HttpRequest) -> Response:
        running, waiting = service.engine.load
        status = "stopped" if service.engine.stopped else "ok"
        return JSONResponse(
            {"status": status, "running": running, "waiting": waiting},
            status_code=503 if service.engine.stopped else 200,
        )

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await run_in_threadpool(service.engine.close)

    return Starlette(
        routes=[
            Route("/v1/chat/completions", guarded(completions(_CHAT)), methods=["POST"]),
            Route("/v1/completions", guarded(completions(_TEXT)), methods=["POST"]),
            Route("/v1/models", guarded(models)),
            Route("/v1/models/{name:path}", guarded(model)),
            Route("/health", health),
        ],
        exception_handlers={
            HTTPException: _http_error,
            InputError: _input_error,
            Stopped: _stopped,
            ClientDisconnect: _gone,
            Exception: _fault,
        },
        lifespan=lifespan,
    )


# -- Errors --------------------------------------------------------------------------------------


def _reply(error: ApiError) -> Response:
    return JSONResponse(error.body(), status_code=error.status, headers=error.headers)


async def _input_error(request: HttpRequest, error: Exception) -> Response:
    if isinstance(error, ApiError):
        return _reply(error)
    if isinstance(error, Busy):
        headers = {"Retry-After": "1"}
        return _reply(
            ApiError(str(error), status=429, kind="rate_limit_error", code="busy", headers=headers)
        )
    return _reply(ApiError(str(error)))


async def _http_error(request: HttpRequest, error: Exception) -> Response:
    what = f"{request.method} {request.url.path}: {error.detail}"
    return _reply(ApiError(what, status=error.status_code, headers=dict(error.headers or {})))


async def _stopped(request: HttpRequest, error: Exception) -> Response:
    return _reply(_unavailable(error))


async def _fault(request: HttpRequest, error: Exception) -> Response:
    # Starlette logs it with its traceback.
    return _reply(ApiError("the server met a fault", status=500, kind="server_error"))


async def _gone(request: HttpRequest, error: Exception) -> Response:
    # Nobody reads it; 499 is what servers write into their logs for this.
    return Response(status_code=499)


def _unavailable(error: Exception) -> ApiError:
    status = 503 if isinstance(error, Stopped) else 500
    return ApiError(f"the model has stopped: {error}", status=status, kind="server_error")


# -- Requests ------------------------------------------------------------------------------------


def _authorize(request: HttpRequest, limits: Limits) -> None:
    if limits.api_key is None:
        return
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    right = hmac.compare_digest(key.strip().encode(), limits.api_key.encode())
    if scheme.lower() != "bearer" or not right:
        raise ApiError(
            "wrong or missing API key: send it as `Authorization: Bearer KEY`",
            status=401, kind="authentication_error", code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )  # fmt: skip


async def _body(request: HttpRequest, limits: Limits) -> bytes:
    """The body, read no further than its limit."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limits.body_bytes:
            raise ApiError(
                f"the request is larger than {limits.body_bytes:,} bytes",
                status=413, code="too_large",
            )  # fmt: skip
        parts.append(part)
    return b"".join(parts)


# -- Answers -------------------------------------------------------------------------------------


class _Stream:
    """Progress of several jobs, in the order in which it comes."""

    def __init__(self, service: Service, jobs: list[Job]):
        """Nothing runs before `start`."""
        self._engine, self._jobs = service.engine, jobs
        self._news: asyncio.Queue[tuple[int, Progress]] = asyncio.Queue()
        self._left = set(range(len(jobs)))
        self._tickets = []
        self._loop = asyncio.get_running_loop()

    def start(self) -> None:
        """Hands all jobs to the engine, or none; in any thread.

        Raises:
            InputError, Stopped: see `Engine.submit`.
        """
        try:
            for index, job in enumerate(self._jobs):
                listener = self._listener(index)
                self._tickets.append(self._engine.submit(job.request, listener))
        except BaseException:
            self.cancel()
            raise

    def _listener(self, index: int) -> Callable[[Progress], None]:
        def listener(progress: Progress) -> None:
            self._loop.call_soon_threadsafe(self._news.put_nowait, (index, progress))

        return listener

    def cancel(self) -> None:
        """Gives up what has not ended."""
        for index in self._left.intersection(range(len(self._tickets))):
            self._engine.cancel(self._tickets[index])

    async def __aiter__(self) -> AsyncIterator[tuple[int, Progress]]:
        """(job, its news) until every job has ended.

        Raises:
            ApiError: the engine has stopped.
        """
        try:
            while self._left:
                index, progress = await self._news.get()
                if progress.error is not None:
                    raise _unavailable(progress.error)
                if progress.finish is not None:
                    self._left.discard(index)
                yield index, progress
        finally:
            self.cancel()


async def _answer(
    request: HttpRequest, service: Service, kind: _Kind, body: Any, jobs: list[Job]
) -> Response:
    stream = _Stream(service, jobs)
    await run_in_threadpool(stream.start)
    # Each prompt counts once, whatever the number of its answers.
    prompts = sum(len(job.request.prompt) for job in jobs[:: body.choices])
    if body.stream:
        frame = Frame(new_id(kind.prefix), kind.chunk, service.model)
        events = _events(stream, frame, jobs, prompts, body.with_usage)
        return StreamingResponse(events, media_type="text/event-stream")
    frame = Frame(new_id(kind.prefix), kind.whole, service.model)
    return await _whole(request, stream, frame, jobs, prompts)


async def _events(
    stream: _Stream, frame: Frame, jobs: list[Job], prompts: int, with_usage: bool
) -> AsyncIterator[str]:
    """Server-sent events; ends the jobs where the client goes away."""
    more = {"usage": None} if with_usage else {}
    emitted = 0
    try:
        async for index, progress in stream:
            emitted += len(progress.tokens)
            for choice in jobs[index].choice.chunks(progress):
                yield _event(frame.wrap([choice], **more))
        if with_usage:
            yield _event(frame.wrap([], usage=usage(prompts, emitted)))
    except ApiError as error:
        # The status has been sent already.
        yield _event(error.body())
    finally:
        stream.cancel()
    yield "data: [DONE]\n\n"


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


async def _whole(
    request: HttpRequest, stream: _Stream, frame: Frame, jobs: list[Job], prompts: int
) -> Response:
    async def collect() -> int:
        emitted = 0
        async for index, progress in stream:
            emitted += len(progress.tokens)
            for _ in jobs[index].choice.chunks(progress):
                pass
        return emitted

    task = asyncio.create_task(collect())
    try:
        while not (await asyncio.wait([task], timeout=_LOOK_EVERY_S))[0]:
            if await request.is_disconnected():
                raise ClientDisconnect
        emitted = task.result()
    finally:
        task.cancel()
        stream.cancel()
    choices = [job.choice.whole() for job in jobs]
    return JSONResponse(frame.wrap(choices, usage=usage(prompts, emitted)))
