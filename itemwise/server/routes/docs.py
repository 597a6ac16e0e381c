"""`/docs` and `/openapi.json`: the API for people and for programs. Nothing is loaded from anywhere else."""

from __future__ import annotations

from starlette.responses import HTMLResponse, Response

from itemwise.server.call import Call
from itemwise.server.docs_page import docs_page
from itemwise.server.openapi import openapi_document
from itemwise.server.replies import json_reply
from itemwise.server.routes.page import PAGE_HEADERS
from itemwise.server.service import Service


async def docs(service: Service, call: Call) -> Response:
    """The OpenAPI document as a page."""
    return HTMLResponse(docs_page(has_key=service.options.api_key is not None), headers=PAGE_HEADERS)


async def openapi(service: Service, call: Call) -> Response:
    """The OpenAPI document."""
    return json_reply(openapi_document(has_key=service.options.api_key is not None))
