"""The routes of the dashboard: its pages and the data they read."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from atoll.server.http import problems
from atoll.server.http.auth import authenticate, check_dashboard_host
from atoll.server.http.operations import Operation, PathEndpoint, Plane, RequestHandler, routes
from atoll.server.ui import assets, auth, grid, views

MAX_BODY = 10_000  # a code or a token, with room to spare

OPERATIONS = (
    Operation("POST", "/ui/codes", auth.new_code, "Make a code that signs a browser in.", {}),
    Operation("DELETE", "/ui/sessions", auth.revoke, "End all sessions of the namespace.", {}),
    Operation(
        "POST",
        "/ui/session",
        auth.sign_in,
        "Sign in with a code or a token.",
        {},
        body=auth.SignIn,
        max_body=MAX_BODY,
        is_open=True,
    ),
    Operation("DELETE", "/ui/session", auth.sign_out, "Sign out.", {}),
    Operation("GET", "/ui/rows", views.rows, "Trainings as rows.", {}, query=views.RowsQuery),
    Operation("GET", "/ui/page/{name}", views.page, "One training.", {}, query=views.PageQuery),
    Operation("GET", "/ui/ranks/{name}", views.ranks, "Some ranks.", {}, query=views.RanksQuery),
    Operation(
        "GET",
        "/ui/metrics/{name}",
        views.metric_bands,
        "Its metrics over time.",
        {},
        query=views.MetricBandsQuery,
    ),
    Operation("GET", "/ui/rounds/{name}", grid.rounds, "Its rounds.", {}, query=grid.GridQuery),
    Operation(
        "GET", "/ui/stream", views.stream, "Which trainings change.", {}, query=views.StreamQuery
    ),
)
PAGES = ("/", "/in", "/compare", "/t/{path:path}")


def routes_of(plane: Plane) -> list[Route]:
    return [
        *routes(OPERATIONS, plane, authenticate, problems.on_error),
        *(Route(path, _page(plane, assets.shell)) for path in PAGES),
        Route("/assets/{path:path}", _page(plane, assets.asset)),
    ]


def _page(plane: Plane, handler: RequestHandler) -> PathEndpoint:
    async def get(request: Request) -> Response:
        check_dashboard_host(plane, request)
        return await handler(request)

    return PathEndpoint({"GET": get}, _as_text)


def _as_text(request: Request, error: Exception) -> Response:
    """Errors of pages as plain text: people read them, not programs."""
    if isinstance(error, HTTPException):
        return PlainTextResponse(f"atoll: {error.detail}\n", error.status_code, assets.HEADERS)
    return problems.on_error(request, error)
