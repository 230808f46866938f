"""The files of the dashboard: nothing in them can run what a rank printed, and they are small."""

from __future__ import annotations

import re

import pytest

from atoll.server.ui.routes import POLICY, SHELL, bundle

OWN = sorted(name for name in bundle().plain if name.endswith(".js") and name != "uplot.js")


@pytest.mark.parametrize("name", OWN)
def test_no_script_makes_elements_from_text(name: str) -> None:
    text = bundle().plain[name].decode()
    for way in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "DOMParser",
    ):
        assert way not in text


def test_the_page_has_no_script_or_style_of_its_own_and_asks_no_other_host() -> None:
    page = bundle().plain[SHELL].decode()
    assert not re.search(r"<script(?![^>]*\bsrc=)", page)
    assert "<style" not in page
    assert " style=" not in page
    assert "//" not in page.replace("<!doctype", "")
    assert "unsafe" not in POLICY
    assert "{{" not in page


def test_everything_together_is_small() -> None:
    assert sum(map(len, bundle().packed.values())) < 90_000


def test_every_file_that_is_named_exists() -> None:
    names = set(bundle().plain)
    for name in OWN:
        for wanted in re.findall(r'from "\./([\w.]+)"', bundle().plain[name].decode()):
            assert wanted in names


def test_no_line_of_a_script_or_style_is_longer_than_a_line_of_python() -> None:
    """The formatter breaks code, but not strings and comments."""
    for name in (*OWN, "style.css", SHELL):
        lines = bundle().plain[name].decode().splitlines()
        assert [line for line in lines if len(line) > 100] == [], name
