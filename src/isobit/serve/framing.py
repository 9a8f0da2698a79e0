"""HTTP/1.1 as uvicorn speaks it, with OpenAI's error body for bytes that are no request."""

import json
import sys

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from isobit.serve.errors import ApiError


class OpenAIFraming(H11Protocol):
    """Answers what is not HTTP/1.1 as other bad requests are answered, then closes the connection."""

    def send_400_response(self, msg: str) -> None:
        """Called where reading the request failed; `msg` is uvicorn's own text."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            # An answer is on its way already; there is no place for a second one.
            self.transport.close()
            return
        error = sys.exception()
        status, said = (
            (error.error_status_hint, str(error)) if isinstance(error, h11.RemoteProtocolError) else (400, msg)
        )
        body = json.dumps(ApiError(status, f"the request is not valid HTTP/1.1: {said}").body()).encode()
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        for event in (h11.Response(status_code=status, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event))
        self.transport.close()
