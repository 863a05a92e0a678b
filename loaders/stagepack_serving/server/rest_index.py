"""What a person meets at the address of a server: where its protocols are, and a page of all paths."""

import html
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from stagepack_serving.server.metadata import server_metadata
from stagepack_serving.server.openapi import OPERATIONS

_PATHS = {"protocol": "/v2", "openai": "/v1/models", "docs": "/docs", "openapi": "/openapi.json", "metrics": "/metrics"}


def index_routes() -> list[Route]:
    """The routes ``/`` and ``/docs``."""
    return [Route("/", _index), Route("/docs", _page)]


async def _index(_: Request) -> Response:
    metadata: dict[str, Any] = server_metadata()
    return JSONResponse({"name": metadata["name"], "version": metadata["version"], **_PATHS})


async def _page(_: Request) -> Response:
    """A page without scripts, which requests nothing from the network."""
    rows = "".join(
        f"<tr><td>{operation.method.upper()}</td><td><code>{html.escape(path)}</code></td><td>{html.escape(operation.summary)}</td></tr>"
        for path, operations in OPERATIONS.items()
        for operation in operations
    )
    return HTMLResponse(
        "<!doctype html><meta charset='utf-8'><title>stagepack server</title><h1>stagepack server</h1>"
        "<p>The fields of requests and answers: <a href='/openapi.json'>/openapi.json</a>.</p>"
        f"<table>{rows}</table>"
    )
