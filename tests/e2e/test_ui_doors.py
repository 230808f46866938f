"""What a cookie alone can do: nothing. Other servers of this machine are the same site for a
browser, which sends it along with their requests."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx2
import pytest

from tests.e2e.browser import Visitor, open_browser


class Door(NamedTuple):
    url: str
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
    code = httpx2.post(f"{url}/ui/codes", headers=bearer).json()["code"]
    with httpx2.Client(base_url=url) as client:
        answer = client.post("/ui/session", json={"code": code})
        assert answer.status_code == 200, answer.text
        cookie = answer.headers["set-cookie"].lower()
        assert all(word in cookie for word in ("httponly", "samesite=strict", "path=/"))
        assert token not in answer.text + cookie
        yield Door(url, token, client, answer.json()["csrf"])


def test_a_page_of_ours_reads_and_one_of_others_does_not(door: Door) -> None:
    assert door.get(x_atoll_csrf=door.csrf) == 200
    assert door.get(x_atoll_csrf=door.csrf, origin=door.url) == 200
    assert door.get() == 401
    assert door.get(x_atoll_csrf="0" * 64) == 401
    assert door.get(x_atoll_csrf=door.csrf, origin="http://127.0.0.1:9") == 401
    assert door.get(x_atoll_csrf=door.csrf, origin="null") == 401


def test_a_form_of_another_page_changes_nothing(door: Door, atoll: Any) -> None:
    atoll("up", "--name", "target", "-n", "1", "--", "sleep", "600")
    for path in ("/v1/trainings/target/cancel", "/v1/trainings/target/scale"):
        answer = door.client.post(path, content="target=0", headers={"Origin": "http://evil.test"})
        assert answer.status_code == 401
    assert door.client.delete("/v1/trainings/target").status_code == 401
    assert atoll.json("status", "target")["spec"].get("cancel", False) is False
    atoll("rm", "target")


def test_the_word_of_a_session_is_only_told_to_a_page_of_ours(door: Door) -> None:
    assert door.get("/ui/csrf", sec_fetch_site="same-origin") == 200
    assert door.get("/ui/csrf", sec_fetch_site="same-site") == 401
    assert door.get("/ui/csrf", sec_fetch_site="cross-site") == 401
    assert door.get("/ui/csrf") == 401


def test_a_browser_makes_no_codes_and_a_get_uses_none_up(door: Door) -> None:
    answer = door.client.post("/ui/codes", headers={"X-Atoll-CSRF": door.csrf})
    assert answer.status_code == 401
    bearer = {"Authorization": f"Bearer {door.token}"}
    code = httpx2.post(f"{door.url}/ui/codes", headers=bearer).json()["code"]
    assert httpx2.get(f"{door.url}/in").status_code == 200
    assert httpx2.get(f"{door.url}/ui/session").status_code == 405
    assert httpx2.post(f"{door.url}/ui/session", json={"code": code}).status_code == 200


def test_a_token_signs_in_and_a_wrong_one_does_not(door: Door) -> None:
    assert httpx2.post(f"{door.url}/ui/session", json={"token": door.token}).status_code == 200
    assert httpx2.post(f"{door.url}/ui/session", json={"token": "atoll_x"}).status_code == 401
    assert httpx2.post(f"{door.url}/ui/session", json={}).status_code == 401
    assert httpx2.post(f"{door.url}/ui/session", json={"code": "x" * 500}).status_code == 400


def test_a_session_ends_with_the_token_it_came_from(atoll: Any, door: Door) -> None:
    made = atoll.json("token", "create", "--label", "short")
    with httpx2.Client(base_url=door.url) as client:
        csrf = client.post("/ui/session", json={"token": made["token"]}).json()["csrf"]
        header = {"X-Atoll-CSRF": csrf}
        assert client.get("/ui/rows", headers=header).status_code == 200
        assert atoll("token", "revoke", made["id"]).returncode == 0
        assert client.get("/ui/rows", headers=header).status_code == 401


def test_pages_are_served_with_a_strict_policy_and_assets_for_ever(door: Door) -> None:
    page = httpx2.get(f"{door.url}/t/anything")
    assert page.status_code == 200
    assert "script-src 'self'" in page.headers["content-security-policy"]
    assert page.headers["x-content-type-options"] == "nosniff"
    asset = page.text.split('src="')[1].split('"')[0]
    answer = httpx2.get(door.url + asset)
    assert "immutable" in answer.headers["cache-control"]
    assert httpx2.get(f"{door.url}/assets/other/app.js").status_code == 404
    assert (
        httpx2.get(f"{door.url}/assets/{asset.split('/')[2]}/..%2fsessions.py").status_code == 404
    )


def test_another_server_of_this_machine_gets_nothing_from_a_browser_that_is_signed_in(
    atoll: Any,
) -> None:
    atoll("up", "--name", "wanted", "-n", "1", "--max", "3", "--", "sleep", "600")
    url = json.loads((atoll.state / "endpoint.json").read_text())["url"]
    stranger = atoll.json("token", "create", "--label", "stranger")["token"]
    with open_browser() as browser, foreign_server() as foreign:
        visitor = Visitor(browser, atoll)
        link = urlsplit(visitor.link())
        # By 127.0.0.1, where a browser does not tell ports apart.
        visitor.page.goto(f"{url}{link.path}#{link.fragment}")
        visitor.page.wait_for_selector(".chips button")
        page = visitor.context.new_page()
        page.goto(foreign)
        told = page.evaluate(ATTACK, [url, stranger])
        assert told["seen"] == [], "no answer was readable"
        assert visitor.page.evaluate(WHOAMI) == "default"
        for attack in ("/v1/trainings/wanted/cancel", "/v1/trainings/wanted/scale"):
            page.goto(foreign)
            page.evaluate(FORM, [url + attack, '{"target": 3, "x": "', '"}'])
            page.wait_for_url(f"{url}{attack}")
            assert "came from no page of atoll" in page.content()
        # To be signed in as somebody else is to show them what one does.
        page.goto(foreign)
        page.evaluate(FORM, [f"{url}/ui/session", f'{{"token": "{stranger}", "x": "', '"}'])
        page.wait_for_url(f"{url}/ui/session")
        assert "another origin" in page.content()
        status = atoll.json("status", "wanted")
        assert (status["phase"], status["world"]["target"]) == ("ready", 1)
        framed = browser.new_page()
        framed.goto(foreign)
        framed.evaluate("url => { document.body.innerHTML = `<iframe src=${url}></iframe>` }", url)
        framed.wait_for_timeout(300)
        assert all("trainings" not in f.content().lower() for f in framed.frames[1:])
        visitor.context.close()
    atoll("rm", "wanted")


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
WHOAMI = "fetch('/ui/csrf').then((answer) => answer.json()).then((told) => told.namespace)"


@contextlib.contextmanager
def foreign_server() -> Iterator[str]:
    """A page of somebody else, on another port of 127.0.0.1."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
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
        yield f"http://127.0.0.1:{server.server_address[1]}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
