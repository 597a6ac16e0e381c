"""`/docs` and `/openapi.json`: the API for people and for programs. Nothing is loaded from anywhere else."""

from __future__ import annotations

from starlette.responses import HTMLResponse, Response

from prefixwise.server.call import Call
from prefixwise.server.docs_page import docs_page
from prefixwise.server.openapi import openapi_document
from prefixwise.server.replies import json_reply
from prefixwise.server.routes.page import PAGE_HEADERS
from prefixwise.server.service import Service


async def docs(service: Service, call: Call) -> Response:
    """The OpenAPI document as a page."""
    return HTMLResponse(docs_page(has_key=service.options.api_key is not None), headers=PAGE_HEADERS)


async def openapi(service: Service, call: Call) -> Response:
    """The OpenAPI document."""
    return json_reply(openapi_document(has_key=service.options.api_key is not None))
