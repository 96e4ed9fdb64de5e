"""The playground at `/`, in a real browser where one is installed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specdec import Engine, Prompt
from specdec.decode.loop import Batch
from specdec.serve.server import EngineServer
from tests.conftest import ROOT
from tests.serve.browser import (
    CONTROL,
    ENTER,
    ESCAPE,
    RIGHT,
    TAB,
    Browser,
    find_browser,
    start_browser,
)
from tests.serve.servers import CLIENT, MODEL

PAGE = ROOT / "serve" / "page.html"
TEXT = "hello ab"
LENGTH = 24


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if find_browser() is None:
        pytest.skip("chromium and chromedriver are not installed")
    with start_browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture
def page(browser: Browser, served: tuple[EngineServer, str]) -> Browser:
    """The page, just opened, wide and light; what it has asked for and said so far is forgotten."""
    browser.resize(1200, 900)
    browser.set_dark(False)
    browser.open("about:blank")
    browser.list_messages()
    browser.list_requests()
    browser.open(served[1])
    browser.wait("document.getElementById('model').textContent")
    assert browser.run("return document.getElementById('kind').value") == "chat", "as its template"
    set_fields(browser, kind="text")
    browser.run("showIdeas()")
    return browser


def set_fields(page: Browser, **values: Any) -> None:
    for name, value in values.items():
        page.run("document.getElementById(arguments[0]).value = arguments[1]", name, value)


def generate(page: Browser) -> None:
    """Ask for TEXT with and without speculation, and wait until both are there."""
    set_fields(page, prompt=TEXT, tokens=LENGTH)
    page.press(CONTROL, ENTER)
    page.wait("document.body.dataset.done")
    page.run("delete document.body.dataset.done")


def read_tokens(page: Browser) -> list[list[Any]]:
    """Of each side, the tokens: text, class, title and depth."""
    found: list[list[Any]] = page.run(
        "return [...document.querySelectorAll('.out')].map(out => [...out.children].map(span =>"
        " [span.textContent, span.className.split(' ')[0], span.title,"
        " Number(span.style.getPropertyValue('--k'))]))"
    )
    return found


def test_the_page_needs_nothing_from_elsewhere(served: tuple[EngineServer, str]) -> None:
    answer = CLIENT.get(served[1])
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    page = answer.text.replace("http://www.w3.org/2000/svg", "")
    assert re.findall(r"https?://|src=|@import|url\(|innerHTML|eval\(", page) == []
    assert "prefers-color-scheme: dark" in page
    labelled = set(re.findall(r'for="(\w+)"', page))
    for tag in re.findall(r"<(?:input|textarea|select)[^>]*>", page):
        at = page.index(tag)
        inside = page.rfind("<label", 0, at) > page.rfind("</label>", 0, at)
        found = re.search(r'id="(\w+)"', tag)
        assert inside or "aria-label" in tag or (found and found[1] in labelled), tag


def test_every_token_is_marked_and_both_sides_agree(
    page: Browser, folder: Path, served: tuple[EngineServer, str]
) -> None:
    generate(page)
    drafted, plain = read_tokens(page)
    with Engine.load(folder, device="cpu", speculation=False) as engine:
        (expected,) = engine.generate(Prompt(text=TEXT, temperature=0), max_output_len=LENGTH)
    assert [token[0] for token in drafted] == [token[0] for token in plain]
    assert "".join(token[0] for token in plain).startswith(expected.text)
    assert {token[1] for token in plain} == {"plain"}
    assert {token[1] for token in drafted} == {"plain", "draft", "bonus"}
    depth = 0
    for _, kind, title, told in drafted:
        depth = depth + 1 if kind == "draft" else 0
        assert told == depth
        assert kind in title or "the target's own" in title
        assert (f"depth {depth}" in title) == (kind == "draft")
    assert page.run("return document.getElementById('model').textContent") == MODEL
    assert page.run("return document.getElementById('method').textContent") == (
        "redrafter \u00b7 float32 \u00b7 cpu"
    )
    verdict = page.run("return document.getElementById('verdict').textContent")
    assert re.match(r"(\d+ % (faster|slower)|[\d.]+ times as fast|As fast) with drafts", verdict)
    first_tokens = page.run(
        "return [...document.querySelectorAll('.stats')].map(s => s.textContent)"
    )
    assert re.search(
        r"[1-9]\d* of the prompt's [1-9]\d* tokens came from the cache", first_tokens[1]
    )
    assert verdict.endswith("; both texts are the same.")
    stats = page.run("return [...document.querySelectorAll('.stats')].map(s => s.textContent)")
    assert "of the drafts accepted" in stats[0]
    assert "of the drafts accepted" not in stats[1]
    assert page.list_messages() == []
    assert {url for url in page.list_requests() if not url.startswith("data:")} == {
        f"{served[1]}{path}" for path in ("/", "/v1/models", "/v1/completions")
    }


def test_a_chosen_step_shows_its_tree_and_charts(page: Browser) -> None:
    generate(page)
    steps = page.run("return sides[0].steps.map(step => step.tree)")
    count = len(steps) - 1
    drafted_steps = [n for n, tree in enumerate(steps) if n and len(tree["tokens"]) > 1]
    assert page.run("return document.getElementById('step').value") == str(drafted_steps[-1])
    tokens = read_tokens(page)[0]
    at = 1
    for number, tree in enumerate(steps[1:], 1):
        page.run(
            "const step = document.getElementById('step'); step.value = arguments[0];"
            "step.dispatchEvent(new Event('input'))", number,
        )  # fmt: skip
        shown = page.run(
            "return {title: document.getElementById('steptitle').textContent,"
            " caption: document.getElementById('caption').textContent,"
            " nodes: document.querySelectorAll('#tree .node').length,"
            " taken: document.querySelectorAll('#tree .node.taken').length,"
            " chosen: [...document.querySelectorAll('.out')[0].children].map((s, i) =>"
            "   s.classList.contains('chosen') ? i : -1).filter(i => i >= 0),"
            " bars: document.querySelectorAll('#chart .bar').length,"
            " bar: [...document.querySelectorAll('#chart .bar')].findIndex(b =>"
            "   b.classList.contains('chosen'))}"
        )
        accepted = len(tree["accepted"]) - 1
        end = min(at + accepted + 1, len(tokens))
        assert shown["title"] == f"Step {number} of {count}"
        drafted = len(tree["tokens"]) - 1
        assert shown["caption"].startswith(f"{drafted} drafted, {accepted} accepted")
        assert shown["nodes"] == len(tree["tokens"]) + (at + accepted < len(tokens))
        assert shown["taken"] == accepted
        assert shown["chosen"] == list(range(at, end))
        assert (shown["bars"], shown["bar"]) == (count, number - 1)
        at += accepted + 1
    page.run("document.querySelectorAll('.out')[0].children[1].click()")
    assert page.run("return document.getElementById('steptitle').textContent").startswith("Step 1 ")
    assert page.run("return document.querySelectorAll('#speed polyline').length") == 2


def test_the_keyboard_is_enough(
    page: Browser, served: tuple[EngineServer, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    order = []
    page.run("document.querySelector('details').open = true")
    for _ in range(13):
        order.append(page.run("return document.activeElement.id"))
        page.press(TAB)
    assert order[:12] == [
        "prompt", "", "", "", "", "kind", "tokens", "temperature", "top_p", "seed", "compare", "",
    ]  # fmt: skip
    generate(page)
    page.run("document.getElementById('step').focus()")
    page.run("const s = document.getElementById('step'); s.value = 1")
    page.press(RIGHT)
    assert page.run("return document.getElementById('steptitle').textContent").startswith("Step 2 ")
    step = Batch.step

    def wait(batch: Batch) -> None:
        page.run("return 1")  # as slow as the browser
        step(batch)

    monkeypatch.setattr(Batch, "step", wait)
    set_fields(page, tokens=250)
    page.press(CONTROL, ENTER)
    page.wait("sides[0].tokens.length > 2")
    page.press(ESCAPE)
    page.wait("document.body.dataset.done")
    monkeypatch.undo()
    assert len(read_tokens(page)[0]) < 250
    assert page.run("return document.getElementById('error').textContent") == ""
    assert page.list_messages() == []


@pytest.mark.parametrize("is_dark", [False, True])
def test_narrow_windows_and_dark_mode(page: Browser, is_dark: bool) -> None:
    """Nothing is wider than the window, and all text can be read."""
    page.resize(360, 640)
    page.set_dark(is_dark)
    generate(page)
    widths = page.run("return [document.documentElement.scrollWidth, innerWidth]")
    assert widths == [360, 360]
    ratios = page.run(
        """
        const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
        const read = (...colors) => {  // as they lie on one another, as light from 0 to 1
          for (const color of colors) { canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1); }
          const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map(v => v / 255)
            .map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
          return .2126 * r + .7152 * g + .0722 * b;
        };
        return [...document.querySelectorAll("h1, h2, label, dt, dd, .out span, .key, #caption, code, #verdict, .main")]
          .map(node => {
            const backs = [];
            for (let at = node; at; at = at.parentElement) backs.unshift(getComputedStyle(at).backgroundColor);
            const back = read("#000", ...backs), text = read("#000", ...backs, getComputedStyle(node).color);
            return [(Math.max(back, text) + .05) / (Math.min(back, text) + .05), node.outerHTML.slice(0, 80)];
          });
        """  # noqa: E501
    )
    assert len(ratios) > 2 * LENGTH
    assert min(ratios)[0] >= 4.5, min(ratios)
    back = page.run("return getComputedStyle(document.body).backgroundColor")
    assert back == ("rgb(16, 18, 20)" if is_dark else "rgb(245, 246, 248)")


def test_a_text_without_marks(page: Browser) -> None:
    """Where the engine does not tell how its tokens came, as TensorRT-LLM's that draft."""
    generate(page)
    marked = read_tokens(page)[0]
    page.run("tells = {origins: false, trees: false}")
    generate(page)
    (shown,) = read_tokens(page)
    assert "".join(token[0] for token in shown) == "".join(token[0] for token in marked)
    assert {token[1] for token in shown} == {""}
    assert page.list_messages() == []


def test_a_prompt_to_click_and_how_deep_drafts_are_accepted(page: Browser) -> None:
    set_fields(page, tokens=LENGTH)
    assert page.run("return document.getElementById('locked').hidden"), "no key is asked for"
    prompt = page.run(
        "document.querySelector('#ideas button').click();"
        "return document.getElementById('prompt').value"
    )
    page.wait("document.body.dataset.done")
    shown = page.run("return [...document.querySelectorAll('.prompt')].map(p => p.textContent)")
    assert shown == [prompt, prompt]
    trees = page.run("return sides[0].steps.slice(1).map(step => step.tree)")
    accepted = [len(tree["accepted"]) - 1 for tree in trees]
    lines = page.run(
        "return [...document.querySelectorAll('#depths > :nth-child(3n)')].map(s => s.textContent)"
    )
    assert lines[0].startswith(f"{sum(count >= 1 for count in accepted)} of ")
    assert page.run("return document.querySelectorAll('#marks rect').length") == sum(
        count > 0 for count in accepted
    )
    assert page.list_messages() == []


def test_an_error_is_a_message(page: Browser) -> None:
    set_fields(page, prompt="x" * 3000)
    page.press(CONTROL, ENTER)
    page.wait("document.body.dataset.done")
    told = page.run("return document.querySelector('[role=alert]').textContent")
    assert "max_input_len is" in told
    page.run("delete document.body.dataset.done")
    generate(page)
    assert page.run("return document.querySelector('[role=alert]').textContent") == ""
    set_fields(page, kind="chat")
    generate(page)
    drafted, plain = read_tokens(page)
    assert [token[0] for token in drafted] == [token[0] for token in plain]


def test_a_verdict_speaks_of_drafts_where_one_was_accepted(page: Browser) -> None:
    generate(page)
    for drafted, accepted, expected in (
        (0, 0, "Nothing was drafted: both runs decode plainly; both texts are the same."),
        (9, 0, "None of 9 drafted tokens was accepted: the drafts gained nothing; both texts are"),
    ):
        page.run(
            "const m = sides[0].metrics; m.generation_time_ms = 10;"
            "Object.assign(m.speculative_decoding, {num_draft_tokens: arguments[0],"
            " num_accepted_draft_tokens: arguments[1]}); showVerdict()", drafted, accepted,
        )  # fmt: skip
        verdict = page.run("return document.getElementById('verdict').textContent")
        assert verdict.startswith(expected)
        assert page.run("return document.getElementById('verdict').className") == ""


def test_one_slow_step_leaves_the_chart_readable(page: Browser) -> None:
    """A line of a steady speed stays in the middle of the chart, whatever one step took."""
    generate(page)
    heights = page.run(
        "const steady = [...Array(60)].map((_, at) => [at / 10, at + 1]);"
        "const slow = steady.map(([when, count]) => [when + (count > 30 ? 60 : 0), count]);"
        "return [steady, slow].map(times => {"
        "  sides = [{...sides[0], times}]; showSpeed();"
        "  const line = document.querySelector('#speed polyline').getAttribute('points');"
        "  const ys = line.split(' ').map(p => Number(p.split(',')[1])).sort((a, b) => a - b);"
        "  return ys[ys.length >> 1]; })"
    )
    assert all(15 <= height <= 110 for height in heights), heights


def test_prompts_suit_a_chat_model(page: Browser) -> None:
    set_fields(page, kind="chat")
    page.run("document.getElementById('kind').dispatchEvent(new Event('change'))")
    prompt = page.run("return document.getElementById('prompt').value")
    assert prompt.startswith("Write a Python class")
    set_fields(page, prompt="My own", kind="text")
    page.run("document.getElementById('kind').dispatchEvent(new Event('change'))")
    assert page.run("return document.getElementById('prompt').value") == "My own"
