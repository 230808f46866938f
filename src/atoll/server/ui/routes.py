"""The addresses of the dashboard."""

from __future__ import annotations

from atoll.server import problems
from atoll.server.auth import caller
from atoll.server.operations import Operation, Plane, routes
from atoll.server.routing import Route
from atoll.server.ui import assets, doors, grid, views

MAX_BODY = 10_000

OPERATIONS = (
    Operation("POST", "/ui/codes", doors.new_code, "Make a code that signs a browser in.", {}),
    Operation("DELETE", "/ui/sessions", doors.revoke, "End all sessions of the namespace.", {}),
    Operation(
        "POST",
        "/ui/session",
        doors.sign_in,
        "Sign in with a code or a token.",
        {},
        body=doors.SignIn,
        max_body=MAX_BODY,
        is_open=True,
    ),
    Operation("GET", "/ui/csrf", doors.csrf, "The word of this session.", {}, is_open=True),
    Operation("DELETE", "/ui/session", doors.sign_out, "Sign out.", {}),
    Operation("GET", "/ui/rows", views.rows, "Trainings as rows.", {}, query=views.RowsQuery),
    Operation("GET", "/ui/page/{name}", views.page, "One training.", {}, query=views.PageQuery),
    Operation("GET", "/ui/ranks/{name}", views.ranks, "Some ranks.", {}, query=views.RanksQuery),
    Operation("GET", "/ui/curves/{name}", views.curves, "Its curves.", {}, query=views.CurvesQuery),
    Operation("GET", "/ui/rounds/{name}", grid.rounds, "Its rounds.", {}, query=grid.GridQuery),
    Operation("GET", "/ui/stream", views.stream, "What changes.", {}, query=views.StreamQuery),
)
PAGES = ("/", "/in", "/compare", "/t/*")


def routes_of(plane: Plane) -> list[Route]:
    return [
        *routes(OPERATIONS, plane, caller, problems.on_error),
        *(Route("GET", path, assets.shell, problems.on_error) for path in PAGES),
        Route("GET", "/assets/*", assets.asset, problems.on_error),
    ]
