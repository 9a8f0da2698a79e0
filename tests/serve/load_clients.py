"""Clients of the load test: those that behave, and those that leave, dawdle or send what is no request."""

import json
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPResponse
from typing import Any

ROUTES = {"prompt": "/v1/completions", "messages": "/v1/chat/completions"}
TIMEOUT = 120
SMALL_BUFFER = 4096
Reply = tuple[str, str, str]  # token hash, text, finish reason


@dataclass
class Tally:
    """What all clients have seen; wrong: what must not be, in words."""

    seen: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, what: str) -> None:
        with self.lock:
            self.seen[what] += 1

    def complain(self, what: str) -> None:
        with self.lock:
            self.wrong.append(what)


@dataclass(frozen=True)
class Case:
    """A request, and the reply that it has alone."""

    body: dict[str, Any]
    alone: Reply

    @property
    def route(self) -> str:
        return route_of(self.body)


def route_of(body: dict[str, Any]) -> str:
    """Where a request is sent."""
    return next(route for name, route in ROUTES.items() if name in body)


def cases(rng: random.Random, count: int, context: int) -> list[dict[str, Any]]:
    """Requests of many kinds; many prompts begin alike, so that states are shared, waited for and cut."""
    stems = ["".join(rng.choices("abcdefgh \n", k=context // 2)) for _ in range(3)]
    return [_body(rng, stems, number, context) for number in range(count)]


def _body(rng: random.Random, stems: list[str], number: int, context: int) -> dict[str, Any]:
    text = rng.choice(stems)[: rng.randrange(1, context // 2)] + rng.choice(["", "?", f" {number} é"])
    body: dict[str, Any] = {
        "max_tokens": rng.choice([1, 5, 20, 40, 80]),
        "temperature": rng.choice([0, 0.7, 1.0]),
        "seed": number,
        "ignore_eos": rng.random() < 0.7,
        "priority": "background" if rng.random() < 0.1 else "normal",
    }
    if rng.random() < 0.3:
        body["stop"] = rng.choice([["e", "\n"], ["ab"], "the"])
    if rng.random() < 0.3:
        body["prefill"] = rng.choice(["serial", "batched", "deep"])
    if rng.random() < 0.3:
        body |= {"segment_rows": rng.choice([7, 50, 300]), "reuse": True}
    if rng.random() < 0.4:
        return body | {"messages": [{"role": "system", "content": text}, {"role": "user", "content": "Why?"}]}
    return body | {"prompt": text}


def alone(connection: HTTPConnection, body: dict[str, Any]) -> Reply:
    """The reply of a server that does nothing else, computed row by row."""
    asked = {**body, "prefill": "serial", "draft": False, "reuse": False, "segment_rows": None}
    response = _post(connection, asked)
    assert response.status == 200, response.read()
    return reply_of(json.loads(response.read()))


def reply_of(answer: dict[str, Any]) -> Reply:
    """What a whole answer says."""
    choice = answer["choices"][0]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    return answer["isobit"]["token_hash"], text or "", choice["finish_reason"]


def _post(connection: HTTPConnection, body: dict[str, Any]) -> HTTPResponse:
    connection.request("POST", route_of(body), json.dumps(body), {"Content-Type": "application/json"})
    return connection.getresponse()


class Client(threading.Thread):
    """One client: whatever its random numbers tell it, one request after the other, until `until`."""

    def __init__(self, port: int, seed: int, cases: list[Case], too_long: int, until: float, tally: Tally):
        super().__init__(daemon=True)
        self.port, self.cases, self.too_long, self.until, self.tally = port, cases, too_long, until, tally
        self.rng = random.Random(seed)

    def run(self) -> None:
        kinds: list[tuple[Callable[[], None], int]] = [
            (self.whole, 6),
            (self.streamed, 6),
            (self.slow, 2),
            (self.leaves_the_stream, 4),
            (self.leaves_before_the_reply, 3),
            (self.leaves_within_the_body, 1),
            (self.malformed, 2),
            (self.no_http, 1),
            (self.prompt_too_long, 1),
        ]
        weights = [weight for _, weight in kinds]
        while time.monotonic() < self.until:
            act = self.rng.choices(kinds, weights)[0][0]
            try:
                act()
            except Exception as error:
                self.tally.complain(f"{act.__name__}: {type(error).__name__}: {error}")
                return

    def whole(self) -> None:
        case = self.rng.choice(self.cases)
        with self.connection() as connection:
            response = self.post(connection, case.body)
            if response is not None:
                self.compare(case, reply_of(json.loads(response.read())), "whole")

    def streamed(self) -> None:
        case = self.rng.choice(self.cases)
        with self.connection() as connection:
            response = self.post(connection, case.body | {"stream": True})
            if response is not None:
                self.compare(case, read_stream(response), "streamed")

    def slow(self) -> None:
        """Reads less than is sent, until the server has to wait for it."""
        case = self.rng.choice(self.cases)
        logprobs = {"logprobs": 20} if "prompt" in case.body else {"logprobs": True, "top_logprobs": 20}
        pause = self.rng.choice([0.002, 0.01, 0.03])
        with self.connection(SMALL_BUFFER) as connection:
            response = self.post(connection, case.body | logprobs | {"stream": True})
            if response is not None:
                self.compare(case, read_stream(response, lambda: time.sleep(pause)), "slow")

    def leaves_the_stream(self) -> None:
        case = self.rng.choice(self.cases)
        connection = self.connection()
        response = self.post(connection, case.body | {"stream": True})
        if response is not None:
            for _ in range(self.rng.randrange(12)):
                response.readline()
            self.tally.count("left the stream")
        self.hang_up(connection)

    def leaves_before_the_reply(self) -> None:
        body = self.rng.choice(self.cases).body
        connection = self.connection()
        connection.request("POST", route_of(body), json.dumps(body), {"Content-Type": "application/json"})
        time.sleep(self.rng.choice([0, 0.005, 0.05, 0.3]))
        self.hang_up(connection)
        self.tally.count("left before the reply")

    def leaves_within_the_body(self) -> None:
        with socket.create_connection(("127.0.0.1", self.port), TIMEOUT) as connection:
            connection.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"prom')
            time.sleep(self.rng.choice([0, 0.02]))
        self.tally.count("left within the body")

    def malformed(self) -> None:
        content = self.rng.choice(
            [
                b"",
                b"{",
                b"\xff\xfe",
                b"[]",
                b'{"prompt": 5}',
                b'{"prompt": ""}',
                b'{"prompt": [-1]}',
                b'{"prompt": "a", "temperature": 9}',
                b'{"prompt": "a", "frob": 1}',
                b'{"prompt": "a", "n": 2}',
            ]
        )
        with self.connection() as connection:
            connection.request("POST", "/v1/completions", content, {"Content-Type": "application/json"})
            self.expect_error(connection.getresponse(), 400, "malformed", repr(content))

    def no_http(self) -> None:
        line = self.rng.choice([b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n", b"POST /v1/completions HTTP/9\r\n\r\n"])
        with socket.create_connection(("127.0.0.1", self.port), TIMEOUT) as connection:
            connection.sendall(line + b"\r\n\r\n")
            connection.settimeout(TIMEOUT)
            answer = b""
            while piece := _received(connection):
                answer += piece
        if not answer.startswith(b"HTTP/1.1 400") or b'{"error": {"message": ' not in answer:
            self.tally.complain(f"no HTTP at all was answered with {answer[:80]!r}")
        self.tally.count("no http")

    def prompt_too_long(self) -> None:
        with self.connection() as connection:
            response = _post(connection, {"prompt": "x" * self.rng.choice([self.too_long, 20 * self.too_long])})
            self.expect_error(response, 400, "too long", "a prompt that is too long", "context_length_exceeded")

    def connection(self, buffer: int | None = None) -> HTTPConnection:
        connection = _Connection("127.0.0.1", self.port, timeout=TIMEOUT)
        if buffer is not None:
            connection.sock = socket.socket()
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
            connection.sock.settimeout(TIMEOUT)
            connection.sock.connect(("127.0.0.1", self.port))
        return connection

    def post(self, connection: HTTPConnection, body: dict[str, Any]) -> HTTPResponse | None:
        """The response, or None if too many wait: the client then rests a little."""
        response = _post(connection, body)
        if response.status == 200:
            return response
        self.expect_error(response, 503, "busy", f"a good request ({body})", "queue_full")
        time.sleep(self.rng.uniform(0.05, 0.3))
        return None

    def expect_error(self, response: HTTPResponse, status: int, kind: str, sent: str, code: str | None = None) -> None:
        error = json.loads(response.read())["error"]
        if response.status != status or (code is not None and error["code"] != code):
            self.tally.complain(f"{sent} was answered with {response.status}: {error}")
        self.tally.count(kind)

    def compare(self, case: Case, reply: Reply, kind: str) -> None:
        if reply != case.alone:
            self.tally.complain(f"{kind}: {case.body} gave {reply}, but {case.alone} alone")
        self.tally.count(kind)

    def hang_up(self, connection: HTTPConnection) -> None:
        """Close, with a reset every other time."""
        if connection.sock is not None and self.rng.random() < 0.5:
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()


class _Connection(HTTPConnection):
    def __enter__(self) -> "_Connection":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_stream(response: HTTPResponse, between: Callable[[], None] = lambda: None) -> Reply:
    """What the chunks of a stream say; `between` is called after each line."""
    text, last = "", {}
    for chunk in _chunks(response, between):
        if "error" in chunk:
            raise AssertionError(f"the stream ended with {chunk['error']}")
        choice = chunk["choices"][0]
        text += (choice["delta"].get("content") if "delta" in choice else choice["text"]) or ""
        last = chunk
    return last["isobit"]["token_hash"], text, last["choices"][0]["finish_reason"]


def _chunks(response: HTTPResponse, between: Callable[[], None]) -> Iterator[dict[str, Any]]:
    while line := response.readline():
        between()
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])


def _received(connection: socket.socket) -> bytes:
    try:
        return connection.recv(4096)
    except ConnectionResetError:
        return b""
