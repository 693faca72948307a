"""The page of a look in a real browser: no error, no request, and a cell's numbers are the look's."""

from __future__ import annotations

import re

import numpy as np
import pytest

from qkv.look import html
from tinyllm import opened, write_model

pytestmark = [pytest.mark.slow, pytest.mark.oracle]

TEXT = "</script><img src=x onerror=alert(1)> ab cd\nab 你好 cd"
PHONE = {"width": 360, "height": 740}


@pytest.fixture(scope="module")
def look(tmp_path_factory):
    with opened(write_model(tmp_path_factory.mktemp("model") / "tiny"), cache="f32") as llm:
        yield llm.look(TEXT, generate=5)


@pytest.fixture
def show(browser, look, tmp_path):
    """Opens the look's page, and watches over it."""
    faults, contexts = [], []

    def open_page(**options):
        path = tmp_path / "look.html"
        path.write_text(html.page(look, 1, 2), encoding="utf-8")
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.on("request", lambda request: request.url == path.as_uri() or faults.append(request.url))
        page.on("console", lambda line: faults.append(line.text))
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("dialog", lambda dialog: (faults.append(dialog.message), dialog.dismiss()))
        page.goto(path.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert faults == []


def hover(page, i, j, T):
    box = page.locator("#map").bounding_box()
    edge = float(page.get_attribute("#map", "data-edge"))
    cell = (box["width"] - edge) / T
    page.mouse.move(box["x"] + edge + (j + 0.5) * cell, box["y"] + edge + (i + 0.5) * cell)


def assert_cell(page, look, layer, head, i, j):
    weights = look.row(layer, head, i)
    values = dict(zip(page.locator("dt").all_inner_texts(), page.locator("dd").all_inner_texts(), strict=True))
    score = float(values["score ⟨q, k⟩ / √d"].split("= ")[1])
    assert abs(score - look.scores(layer, head)[i, j]) < 5e-3
    share = float(re.search(r"= (\S+);", values["softmax e^s / Σ e^s"])[1])
    assert abs(share - weights[j]) < 1e-3
    assert abs(float(values["z = Σ weight · v"].split("= ")[1]) - np.linalg.norm(look.z(layer, head)[i])) < 1e-3
    shown = [float(text) for text in page.locator("#top b").all_inner_texts()]
    assert np.abs(np.array(shown) - np.sort(weights)[::-1][:10]).max() < 1e-3


def test_pointing_at_a_cell_shows_its_numbers(show, look):
    page = show(viewport={"width": 1400, "height": 1000})
    T = len(look)
    assert page.locator("#grid button").count() == 8
    hover(page, 30, 7, T)
    assert "(30) takes from" in page.inner_text("#cell") and page.inner_text("#cell").endswith("(7)")
    assert_cell(page, look, 1, 2, 30, 7)
    page.click("#grid button >> nth=1")
    assert page.inner_text("#head-title").startswith("Layer 0, head 1")
    assert_cell(page, look, 0, 1, 30, 7)
    hover(page, 7, 30, T)
    assert "weight 0" in page.inner_text("#formula")


def test_keys_do_what_the_mouse_does(show, look):
    page = show()
    page.focus("#map")
    assert page.inner_text("#cell").endswith(f"({look.row(1, 2, -1).argmax()})")
    hover(page, len(look) - 1, len(look) - 1, len(look))
    for key in ("ArrowUp", "ArrowUp", "ArrowLeft", "ArrowLeft", "ArrowLeft", "+"):
        page.keyboard.press(key)
    T = len(look)
    assert f"({T - 3})" in page.inner_text("#cell") and page.inner_text("#cell").endswith(f"({T - 4})")
    assert_cell(page, look, 1, 2, T - 3, T - 4)
    assert f"to {T - 1}" in page.inner_text("#window")
    page.focus("#grid [tabindex='0']")
    page.keyboard.press("ArrowUp")
    assert page.inner_text("#head-title").startswith("Layer 0, head 2")
    page.focus("#row")
    page.keyboard.press("End")
    assert "generated, 5 of 5" in page.inner_text("#row-name")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone(show, scheme, tmp_path_factory):
    page = show(viewport=PHONE, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    page.screenshot(path=tmp_path_factory.mktemp("pictures") / f"look-{scheme}.png", full_page=True)
