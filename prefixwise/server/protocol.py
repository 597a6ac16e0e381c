"""What is no HTTP gets an answer as well, in the shape of all errors. Stands before the gate, which needs a request."""

from __future__ import annotations

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from prefixwise.contract.errors import InvalidRequestError
from prefixwise.server.call import new_request_id


class Protocol(HttpToolsProtocol):
    """uvicorn's parser of HTTP, with our words for what it cannot parse."""

    def send_400_response(self, msg: str) -> None:
        """Instead of plain text."""
        error = InvalidRequestError("the request must be valid HTTP/1.1, got something else", code="invalid_http")
        body = orjson.dumps(error.to_body())
        head = (
            "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
            f"x-request-id: {new_request_id()}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
