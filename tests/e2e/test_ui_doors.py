"""Who gets in to the dashboard: who has a code or a token, once. A cookie alone can do nothing."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx2
import pytest

from tests.e2e.browser import Visitor, open_browser
from tests.e2e.conftest import until


class Door(NamedTuple):
    url: str
    origin: str  # by the name that the dashboard has
    token: str
    client: httpx2.Client
    csrf: str

    def get(self, path: str = "/ui/rows", **headers: str) -> int:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return int(self.client.get(path, headers=named).status_code)


@pytest.fixture
def door(atoll: Any) -> Iterator[Door]:
    assert atoll("ps").returncode == 0
    url = json.loads((atoll.state / "endpoint.json").read_text())["url"]
    token = (atoll.state / "token").read_text().strip()
    bearer = {"Authorization": f"Bearer {token}"}
    made = httpx2.post(f"{url}/ui/codes", headers=bearer).json()
    name = f"{made['host']}:{urlsplit(url).port}"
    with httpx2.Client(base_url=url, headers={"Host": name}) as client:
        answer = client.post("/ui/session", json={"code": made["code"]})
        assert answer.status_code == 200, answer.text
        cookie = answer.headers["set-cookie"].lower()
        assert all(word in cookie for word in ("httponly", "samesite=strict", "path=/"))
        assert token not in answer.text + cookie
        yield Door(url, f"http://{name}", token, client, answer.json()["csrf"])


def test_a_page_of_ours_reads_and_one_of_others_does_not(door: Door) -> None:
    assert door.get(x_atoll_csrf=door.csrf) == 200
    assert door.get(x_atoll_csrf=door.csrf, origin=door.origin) == 200
    assert door.get() == 403
    assert door.get(x_atoll_csrf="0" * 64) == 403
    assert door.get(x_atoll_csrf=door.csrf, origin="http://127.0.0.1:9") == 403
    assert door.get(x_atoll_csrf=door.csrf, origin="null") == 403
    assert door.get(x_atoll_csrf=door.csrf, host="127.0.0.1") == 403
    strange = {"X-Atoll-CSRF": "é".encode("latin-1")}
    assert door.client.get("/ui/rows", headers=strange).status_code == 403


def test_a_dashboard_is_under_its_own_name_alone_and_tells_it_to_nobody(door: Door) -> None:
    own = door.origin.removeprefix("http://")
    for host in ("127.0.0.1", "localhost", "[::1]", "evil.localhost", "evil.test", ""):
        for path in ("/", "/in", "/t/any", "/assets/x/app.js"):
            answer = httpx2.get(door.url + path, headers={"Host": host})
            assert answer.status_code == 403, (host, path)
            assert "set-cookie" not in answer.headers
            assert own.partition(":")[0] not in answer.text + str(answer.headers)
        body = {"token": door.token}
        answer = httpx2.post(f"{door.url}/ui/session", json=body, headers={"Host": host})
        assert (answer.status_code, "set-cookie" in answer.headers) == (403, False), host
    assert "run 'atoll ui'" in httpx2.get(door.url).text
    assert httpx2.get(door.url, headers={"Host": own}).status_code == 200


def test_a_page_whose_name_leads_here_reads_nothing(door: Door) -> None:
    """By DNS rebinding."""
    for path in ("/metrics", "/healthz", "/readyz", "/openapi.json", "/v1/trainings", "/nowhere"):
        answer = httpx2.get(door.url + path, headers={"Host": "evil.test"})
        assert answer.status_code == 403, path
        assert "this machine only" in answer.text
    assert httpx2.get(f"{door.url}/metrics").status_code == 200
    bearer = {"Authorization": f"Bearer {door.token}", "Host": "lab.example.org"}
    assert httpx2.get(f"{door.url}/v1/trainings", headers=bearer).status_code == 200


def test_a_cookie_alone_is_of_no_use(door: Door, atoll: Any) -> None:
    """As for a server that the browser sent it to, which can say of itself what it wants."""
    browser = {"Origin": door.origin, "Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors"}
    for method, path in (
        *(("GET", "/ui/csrf"), ("GET", "/ui/session"), ("GET", "/ui/rows"), ("POST", "/ui/codes")),
        *(("GET", "/v1/trainings"), ("DELETE", "/ui/session"), ("DELETE", "/ui/sessions")),
    ):
        answer = door.client.request(method, path, headers=browser)
        assert answer.status_code in (403, 404, 405), (method, path)
        assert door.csrf not in answer.text
    assert door.get(x_atoll_csrf=door.csrf) == 200


def test_a_form_of_another_page_changes_nothing(door: Door, atoll: Any) -> None:
    atoll("run", "-d", "--name", "target", "-n", "1", "--", "sleep", "600")
    for path in ("/v1/trainings/target/cancel", "/v1/trainings/target/scale"):
        answer = door.client.post(path, content="target=0", headers={"Origin": "http://evil.test"})
        assert answer.status_code == 403
    assert door.client.delete("/v1/trainings/target").status_code == 403
    assert atoll.json("status", "target")["spec"].get("cancel", False) is False
    atoll("rm", "-f", "target")


def test_a_browser_makes_no_codes_and_a_get_uses_none_up(door: Door) -> None:
    answer = door.client.post("/ui/codes", headers={"X-Atoll-CSRF": door.csrf})
    assert answer.status_code == 401
    bearer = {"Authorization": f"Bearer {door.token}"}
    code = httpx2.post(f"{door.url}/ui/codes", headers=bearer).json()["code"]
    assert door.client.get("/in").status_code == 200
    assert door.client.get("/ui/session").status_code == 405
    assert door.client.post("/ui/session", json={"code": code}).status_code == 200
    used = door.client.post("/ui/session", json={"code": code})
    assert used.status_code == 401
    assert "this link was already used at " in used.json()["detail"]


def test_a_token_signs_in_and_a_wrong_one_does_not(door: Door) -> None:
    def post(**body: str) -> int:
        return int(door.client.post("/ui/session", json=body).status_code)

    assert post(token=door.token) == 200
    assert post(token="atoll_x") == 401
    assert post(token="é\n") == 401
    assert post() == 401
    assert post(code="x" * 500) == 400


def test_a_session_ends_with_the_token_it_came_from(atoll: Any, door: Door) -> None:
    made = atoll.json("token", "create", "--label", "short")
    with httpx2.Client(base_url=door.url, headers={"Host": door.client.headers["Host"]}) as client:
        csrf = client.post("/ui/session", json={"token": made["token"]}).json()["csrf"]
        header = {"X-Atoll-CSRF": csrf}
        assert client.get("/ui/rows", headers=header).status_code == 200
        assert atoll("token", "revoke", made["id"]).returncode == 0
        assert client.get("/ui/rows", headers=header).status_code == 401


def test_pages_are_served_with_a_strict_policy_and_assets_for_ever(door: Door) -> None:
    page = door.client.get("/t/anything")
    assert page.status_code == 200
    assert "script-src 'self'" in page.headers["content-security-policy"]
    assert page.headers["x-content-type-options"] == "nosniff"
    asset = page.text.split('src="')[1].split('"')[0]
    assert "immutable" in door.client.get(asset).headers["cache-control"]
    assert door.client.get("/assets/other/app.js").status_code == 404
    assert door.client.get(f"/assets/{asset.split('/')[2]}/..%2fsessions.py").status_code == 404


def test_another_server_of_this_machine_gets_nothing_from_a_browser_that_is_signed_in(
    atoll: Any,
) -> None:
    atoll("run", "-d", "--name", "wanted", "-n", "1", "--max", "3", "--", "sleep", "600")
    until(lambda: atoll.json("status", "wanted")["phase"] == "ready")
    stranger = atoll.json("token", "create", "--label", "stranger")["token"]
    with open_browser() as browser, foreign_server() as foreign:
        visitor = Visitor(browser, atoll)
        visitor.sign_in()
        dashboard = visitor.origin
        local = json.loads((atoll.state / "endpoint.json").read_text())["url"]
        page = visitor.context.new_page()
        for name in ("127.0.0.1", "localhost", "evil.localhost"):
            page.goto(foreign.at(name))
            for url in (dashboard, local):
                told = page.evaluate(ATTACK, [url, stranger])
                assert told["seen"] == [], "no answer was readable"
        assert len(foreign.cookies) >= 3
        assert set(foreign.cookies) == {""}, "no cookie went to another host or port"
        for attack in ("/v1/trainings/wanted/cancel", "/v1/trainings/wanted/scale"):
            page.goto(foreign.at("127.0.0.1"))
            page.evaluate(FORM, [dashboard + attack, '{"target": 3, "x": "', '"}'])
            page.wait_for_url(f"{dashboard}{attack}")
            assert "no token" in page.content(), "the browser kept its cookie to itself"
        # To be signed in as somebody else is to show them what one does.
        page.goto(foreign.at("127.0.0.1"))
        page.evaluate(FORM, [f"{dashboard}/ui/session", f'{{"token": "{stranger}", "x": "', '"}'])
        page.wait_for_url(f"{dashboard}/ui/session")
        assert "another origin" in page.content()
        status = atoll.json("status", "wanted")
        assert (status["phase"], status["world"]["target"]) == ("ready", 1)
        framed = browser.new_page()
        framed.goto(foreign.at("127.0.0.1"))
        framed.evaluate(FRAME, dashboard)
        framed.wait_for_function("document.querySelector('iframe').dataset.is === 'done'")
        assert all("trainings" not in f.content().lower() for f in framed.frames[1:])
        still = visitor.context.new_page()  # a new tab is signed in, and as the same
        still.goto(dashboard)
        still.wait_for_selector(".chips button")
        assert "namespace default" in still.inner_text("#namespace")
        visitor.context.close()
    atoll("rm", "-f", "wanted")


def test_who_learns_the_name_and_is_sent_the_cookie_cannot_use_it(atoll: Any) -> None:
    atoll("run", "-d", "--name", "sealed", "-n", "1", "--", "sleep", "600")
    with open_browser() as browser, foreign_server() as foreign:
        visitor = Visitor(browser, atoll)
        visitor.sign_in()
        port = urlsplit(visitor.origin).port
        name = str(urlsplit(visitor.origin).hostname)
        page = visitor.context.new_page()
        page.goto(foreign.at(name))
        page.reload()
        (cookie,) = set(foreign.cookies) - {""}
        assert page.evaluate("Object.keys(localStorage)") == [], "pages of other ports share none"
        headers = {"Host": f"{name}:{port}", "Cookie": cookie, "Origin": visitor.origin}
        headers["Sec-Fetch-Site"] = "same-origin"
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", headers=headers) as thief:
            for method, path in (
                *(("GET", "/ui/rows"), ("GET", "/ui/csrf"), ("GET", "/v1/trainings/sealed")),
                *(("POST", "/v1/trainings/sealed/cancel"), ("DELETE", "/v1/trainings/sealed")),
            ):
                answer = thief.request(method, path)
                assert answer.status_code in (403, 404), (method, path)
                assert "sealed" not in answer.text.replace(path, "")
        assert atoll.json("status", "sealed")["phase"] == "ready"
        visitor.context.close()
    atoll("rm", "-f", "sealed")


def test_a_browser_is_opened_without_the_code_in_its_arguments(atoll: Any) -> None:
    """All users of this machine can read them."""
    told = atoll.cwd / "arguments"
    opener = atoll.cwd / "browser"
    opener.write_text(f'#!/bin/sh\nprintf "%s\\n" "$0" "$@" >> {told}\n')
    opener.chmod(0o700)
    terminal = atoll.in_terminal("ui", BROWSER=str(opener))
    assert terminal.code() == 0
    link = next(line for line in terminal.text.splitlines() if "/in#" in line).strip()
    until(told.exists)
    arguments = told.read_text()
    assert link.partition("#")[2] not in arguments
    assert "://127" not in arguments
    (address,) = re.findall(r"file://\S+", arguments)
    file = Path(address.removeprefix("file://"))
    assert file.parent == atoll.state
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o077) == (0o600, 0)
    with open_browser() as browser:
        page = browser.new_page()
        page.goto(address)
        page.wait_for_selector(".chips button")
        assert page.url.partition("#")[0] == link.partition("/in")[0] + "/"
        late = browser.new_context().new_page()
        late.goto(address)
        late.wait_for_selector(".signin .trouble:has-text('already used at ')")
        assert "atoll ui --revoke" in late.inner_text(".signin .trouble")


def test_a_restarted_control_plane_has_its_port_and_one_sign_in_brings_all_tabs_back(
    lone_atoll: Any,
) -> None:
    lone_atoll("run", "--name", "stays", "--", "true")
    with open_browser() as browser:
        visitor = Visitor(browser, lone_atoll)
        visitor.sign_in()
        origin = visitor.origin
        tab = visitor.open("/t/stays", "h1:has-text('stays')")
        lone_atoll("stop")
        lone_atoll("ps")
        tab.wait_for_selector(".signin")
        assert tab.url == f"{origin}/t/stays"
        other = visitor.tab()
        other.goto(visitor.link())
        other.wait_for_selector(".chips button")
        assert other.url == f"{origin}/"
        tab.wait_for_selector(".facts")
        visitor.close()
    port = int((lone_atoll.state / "port").read_text())
    lone_atoll("stop")
    with socket.create_server(("127.0.0.1", port)):
        lone_atoll("ps")
        assert int((lone_atoll.state / "port").read_text()) != port
    lone_atoll("stop")


def test_a_session_does_not_outlive_its_control_plane(
    browser_free_port: int, lone_atoll: Any
) -> None:
    server = lone_atoll.start("serve", "--port", str(browser_free_port))
    until(lambda: (lone_atoll.state / "endpoint.json").exists())
    with open_browser() as browser:
        visitor = Visitor(browser, lone_atoll)
        visitor.sign_in()
        name = visitor.origin
        server.kill()
        server.communicate()
        server = lone_atoll.start("serve", "--port", str(browser_free_port))
        visitor.page.wait_for_selector(".signin .trouble:has-text('This session has ended')")
        visitor.sign_in()
        assert visitor.origin == name, "its name stays, and so do links to its pages"
        visitor.close()
    lone_atoll.stop()
    server.communicate()


@pytest.fixture
def browser_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


ATTACK = """
async ([url, token]) => {
  const seen = [];
  const tries = [
    ["/ui/csrf", {}], ["/ui/rows", {}], ["/v1/trainings", {}],
    ["/v1/trainings/wanted/cancel", { method: "POST" }],
    ["/v1/trainings/wanted", { method: "DELETE" }],
    ["/ui/session", { method: "POST", body: JSON.stringify({ token }) }],
    ["/ui/codes", { method: "POST" }],
  ];
  for (const [path, options] of tries) {
    try {
      const answer = await fetch(url + path, { credentials: "include", ...options });
      seen.push(`${path} ${answer.status}`);
    } catch { /* the browser hides the answer */ }
    const blind = { credentials: "include", mode: "no-cors", ...options };
    try { await fetch(url + path, blind); } catch { /* not sent */ }
  }
  await new Promise((go) => {
    const image = new Image();
    image.onerror = image.onload = go;
    image.src = url + "/ui/rows";
  });
  return { seen };
}
"""
FORM = """
([action, name, value]) => {
  const form = document.createElement("form");
  form.method = "POST"; form.enctype = "text/plain"; form.action = action;
  const field = document.createElement("input");
  field.name = name; field.value = value;
  form.append(field); document.body.append(form); form.submit();
}
"""
FRAME = """
(url) => {
  const frame = document.createElement("iframe");
  frame.onload = frame.onerror = () => { frame.dataset.is = "done"; };
  frame.src = url;
  document.body.append(frame);
}
"""


class Foreign(NamedTuple):
    """A server of somebody else, on another port of 127.0.0.1, and the cookies that it was sent."""

    port: int
    cookies: list[str]

    def at(self, name: str) -> str:
        return f"http://{name}:{self.port}/"


@contextlib.contextmanager
def foreign_server() -> Iterator[Foreign]:
    cookies: list[str] = []

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            cookies.append(self.headers.get("Cookie", ""))
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>foreign</title><body></body>")

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield Foreign(server.server_address[1], cookies)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
