"""The chat page in a real browser, over the real app: with the default model, and with scripted answers where an answer has to
say something particular. Without a Chromium on this machine these tests are skipped, and say so."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from orchard.serve.app import create_app
from orchard.serve.settings import Limits, ModelSpec, Settings
from orchard.session.executors.scripted import Answer, ToolCall
from tests.serve.browser.asking import DONE, ask, figures, sent, set_field
from tests.serve.browser.contrast import worst_contrast
from tests.serve.browser.devtools import Browser, Page, find_browser
from tests.serve.browser.serving import scripted, serving

pytestmark = [
    pytest.mark.loopback,
    pytest.mark.skipif(find_browser() is None, reason="no Chromium here: install Debian's package chromium"),
]

HOSTILE = (
    "# <img src=x onerror=hacked()>\n\n**<script>hacked()</script>** and `<svg onload=hacked()>`\n\n"
    "- <a href='javascript:hacked()'>click</a>\n- [link](javascript:hacked())\n\n"
    "```<b>html</b>\n</code></pre><iframe src='javascript:hacked()'></iframe>\n```\n> ![x](http://example.com/x.png)"
)
# Writes down how long the first answer is, whenever something changes.
WATCH = """
window.lengths = [];
const look = () => lengths.push(document.querySelector(".body")?.textContent.length ?? 0);
new MutationObserver(look).observe(document.querySelector("#turns"), { childList: true, subtree: true });
"""


@pytest.fixture(scope="module")
def loopback() -> Iterator[None]:
    """What outlives a single test here talks to this machine too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ORCHARD_NO_NETWORK", "loopback")
        yield


@pytest.fixture(scope="module")
def browser(loopback: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = find_browser()
    assert program is not None
    with Browser(program, tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def address(loopback: None, smollm2: Path) -> Iterator[str]:
    """A server with the default model, an adapter that is not there and whose name is a trap, and a second model."""
    spec = ModelSpec("smollm2", "smollm2", {"<b>my</b>-adapter": "nowhere"})
    with serving(create_app(Settings(models=(spec, ModelSpec("second", "smollm2"))))) as url:
        yield url


Open = Callable[..., Page]


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    """Opens the page of a server, ready to be asked. Afterwards: no script failed, and only that server was spoken to."""
    with ExitStack() as after:

        def opened(url: str, expect: tuple[str, ...] = (), ready: bool = True, **looks: Any) -> Page:
            page = browser.page(**looks)
            after.callback(page.close)
            after.callback(check, page, url, expect)
            page.go(url)
            if ready:
                page.until("document.querySelector('#model').value")
            return page

        yield opened


def check(page: Page, url: str, expect: tuple[str, ...]) -> None:
    page.js("0")  # whatever was under way has been told by now
    foreign = [request["url"] for request in page.requests if not request["url"].startswith(url)]
    assert not foreign, foreign
    wrong = [words for words in page.complaints if not any(each in words for each in expect)]
    assert not wrong, wrong


# With the default model -------------------------------------------------------------------------------------------------


@pytest.mark.real
def test_the_page_loads_from_its_own_server_alone(address: str, open_page: Open) -> None:
    page = open_page(address)
    page.until("document.querySelector('#state').dataset.state === 'ready'")
    assert page.js("document.title") == "Orchard"
    assert page.js("document.activeElement.id") == "question"
    asked = {request["url"].removeprefix(address) for request in page.requests}
    assert {"", "page/page.js", "page/page.css", "page/icon.svg", "v1/models"} <= asked
    # Every field has a name that is read out, and every button words.
    nameless = [
        name for name, labels in page.each("input, select, textarea", "[it.id, it.labels.length]") if not labels
    ]
    assert nameless == []
    assert all(page.each("button", "it.textContent.trim()"))
    # Adapters stand under their base, and a name is text whatever it holds.
    groups = page.each("#model optgroup", "[it.label, ...[...it.children].map((one) => one.value)]")
    assert groups == [["smollm2", "smollm2", "smollm2:<b>my</b>-adapter"]]
    assert page.each("#model > option", "it.value") == ["second"]
    assert page.count("#model b") == 0 and page.js("document.querySelector('#model').value") == "smollm2"


@pytest.mark.real
def test_what_the_server_says_is_shown_and_the_choice_is_kept(address: str, open_page: Open) -> None:
    page = open_page(address, expect=("status of 4", "status of 5"))
    set_field(page, "model", "smollm2:<b>my</b>-adapter")
    ask(page, "Hello")
    assert sent(page)["model"] == "smollm2:<b>my</b>-adapter" and page.text(".who") == "smollm2:<b>my</b>-adapter"
    assert "nowhere" in page.text(".problem p") or "my</b>-adapter" in page.text(".problem p")
    page.go(address)
    page.until("document.querySelector('#model').value === 'smollm2:<b>my</b>-adapter'")
    set_field(page, "model", "smollm2")
    set_field(page, "max-tokens", "1")
    page.click(".problem .retry")
    page.until(f"{DONE} && !document.querySelector('.problem')")
    assert figures(page)["Answer"] == "1 token" and sent(page)["model"] == "smollm2"
    set_field(page, "max-tokens", "1.5")
    page.fill("#question", "Hello?")
    page.press("Enter")
    assert "Max tokens must be a whole number" in page.text("#notice") and page.count(".turn") == 2


@pytest.mark.real
def test_an_answer_streams_and_has_its_figures(address: str, open_page: Open) -> None:
    page = open_page(address)
    set_field(page, "seed", "7")
    set_field(page, "max-tokens", "60")
    set_field(page, "system", "You answer in a few words. " * 60)
    page.js(WATCH)
    ask(page, "Name three fruits that grow on trees.")
    lengths = page.js("lengths")
    assert len(set(lengths)) > 3 and lengths == sorted(lengths), "the text grew bit by bit"
    body = sent(page)
    assert body["stream"] is True and body["stream_options"] == {"include_usage": True}
    assert [message["role"] for message in body["messages"]] == ["system", "user"]
    assert body["seed"] == 7 and body["temperature"] == 0.7 and body["max_tokens"] == 60
    first = figures(page)
    assert first["Speed"].endswith(" tokens/s") and float(first["Speed"].split()[0].replace(",", "")) > 0
    assert first["First token"].endswith(("ms", "s")) and first["Answer"].endswith("tokens")
    assert page.js("document.querySelector('.body').getAttribute('aria-live')") == "polite"
    assert page.js("document.querySelector('.body').getAttribute('aria-busy')") == "false"
    # The conversation goes on: what was read before is found in the cache.
    set_field(page, "max-tokens", "5")
    ask(page, "And two vegetables?")
    assert [message["role"] for message in sent(page)["messages"]] == ["system", "user", "assistant", "user"]
    assert int(figures(page)["Prompt"].split(", ")[1].split()[0]) > 0, figures(page)
    assert "limit of 5 tokens" in page.text(".ending")
    # A reload loses nothing, and neither does a new chat that was not meant.
    page.go(address)
    page.until("document.querySelectorAll('.turn').length === 4")
    page.click("#new-chat")
    assert page.count(".turn") == 0
    page.click("#notice button")
    assert page.count(".turn") == 4


@pytest.mark.real
def test_schema_mode_gives_json_that_parses(address: str, open_page: Open) -> None:
    page = open_page(address)
    page.click("#schema-example")
    assert page.text("#schema-words") == "Valid JSON: answers will match it"
    ask(page, "Invent a person who keeps bees.")
    text = page.text(".body.json pre")
    found = json.loads(text)
    assert text == json.dumps(found, indent=2, ensure_ascii=False), "it is indented"
    assert sorted(found) == ["age", "hobbies", "name"] and 0 <= found["age"] <= 120
    assert "Valid JSON" in page.text(".turn .verdict")
    assert sent(page)["response_format"]["json_schema"]["schema"]["required"] == ["name", "age", "hobbies"]
    # Cut off in the middle, it says that it is no JSON, and why.
    set_field(page, "max-tokens", "6")
    ask(page, "Another one.")
    assert "Not valid JSON, because the answer is not complete" in page.text(".turn .verdict")
    # A schema that cannot be sent is not, and the question stays.
    set_field(page, "schema", '{"type": ')
    page.fill("#question", "A third one.")
    page.press("Enter")
    assert "Not valid JSON yet" in page.text("#notice")
    assert page.js("document.querySelector('#question').value") == "A third one."


@pytest.mark.real
def test_a_tool_is_called_and_its_result_goes_back(address: str, open_page: Open) -> None:
    page = open_page(address)
    page.click("#tools-example")
    set_field(page, "tool-choice", "required")
    set_field(page, "max-tokens", "100")
    ask(page, "What is the weather in Oslo?")
    assert page.text(".call-name code") == "get_weather"
    arguments = json.loads(page.text(".call pre"))
    assert set(arguments) == {"city", "unit"}
    assert page.js("document.activeElement === document.querySelector('.call textarea')")
    page.fill(".call textarea", '{"degrees": 4}')
    page.click(".calls button.main")
    page.until(f"document.querySelectorAll('.turn').length === 3 && {DONE}")
    body = sent(page)
    call, result = body["messages"][-2:]
    assert call["tool_calls"][0]["function"]["name"] == "get_weather"
    assert result == {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": '{"degrees": 4}'}
    assert body["tool_choice"] == "auto", "after a result the model may answer"
    assert not page.text(".problem")
    assert "degrees" in page.js("document.querySelector('.call .result').textContent")


@pytest.mark.real
def test_a_conversation_that_is_too_long_shows_both_counts(address: str, open_page: Open) -> None:
    page = open_page(address, expect=("400",))
    ask(page, "apple " * 9000)
    assert "too long" in page.text(".problem strong")
    used, room = page.text(".context span").removesuffix(" tokens").replace(",", "").split(" of ")
    assert int(used) > 9000 and int(room) == 8192
    page.click(".turn.user .edit")
    assert page.js("document.querySelector('#question').value.length") == 54000, "it can be shortened"


# With a script ----------------------------------------------------------------------------------------------------------


def test_stop_stops_and_keeps_what_was_written(open_page: Open) -> None:
    with scripted(Answer("word " * 2000, delay=0.01), "Done.") as (url, model, gate):
        page = open_page(url)
        ask(page, "Write on and on.", "document.querySelector('.body').textContent.length > 30")
        page.click("#stop")
        page.until(DONE)
        assert "You stopped this answer" in page.text(".ending")
        written = page.text(".body")
        assert written.startswith("word word") and len(written) < 5000
        time.sleep(0.1)
        assert page.text(".body") == written
        # The server noticed: nothing runs there any more.
        end = time.monotonic() + 5
        while gate.running:
            assert time.monotonic() < end
            time.sleep(0.01)
        page.click(".actions .retry")
        page.until(f"{DONE} && document.querySelector('.body').textContent === 'Done.'")
        assert [message.role for message in model.turns[1].messages] == ["user"]
        page.click(".under [aria-label='Copy this answer']")
        page.until("document.querySelector('.under .link').textContent === 'Copied'")
        # Escape stops as well.
        model.add(Answer("word " * 2000, delay=0.01))
        ask(page, "Again.", "[...document.querySelectorAll('.body')].at(-1).textContent.length > 20")
        page.press("Escape")
        page.until(DONE)


def test_html_stays_text(open_page: Open) -> None:
    trap = "<img src=x onerror=hacked()>"
    with scripted(HOSTILE, Answer(calls=(ToolCall("look", {"<b>x</b>": trap}),), checked=False)) as (url, _, _):
        page = open_page(url)
        page.js("window.hacked = () => { window.was_hacked = true }")
        ask(page, f"{trap} <script>hacked()</script>")
        assert trap in page.text(".turn.user")
        shown = page.text(".body")
        assert trap in shown and "<iframe" in shown and "[link](javascript:hacked())" in shown
        ask(page, "Call something.")
        assert trap in page.text(".call pre")
        kinds = "img, script, svg, iframe, a, b, object, embed, form[action]"
        assert page.count(f"#turns :is({kinds})") == 0
        assert page.js("window.was_hacked ?? false") is False
        # And the browser itself would refuse markup: the page's policy forbids it.
        assert (
            page.js("(() => { try { document.body.innerHTML = '<b>x</b>' } catch (error) { return error.name } })()")
            == "TypeError"
        )
        page.complaints.clear()  # the browser complained about that last line, as it should


def test_a_key_is_asked_for_when_the_server_wants_one(open_page: Open) -> None:
    with scripted("Welcome.", keys=(hashlib.sha256(b"sk-right").hexdigest(),)) as (url, _, _):
        page = open_page(url, expect=("401",), ready=False)
        page.until("!document.querySelector('#key-form').hidden")
        for key in ("sk-wrong", "sk-right"):
            page.fill("#key", key)
            page.press("Enter")
            page.until("!document.querySelector('#key').value")
            page.until(f"document.querySelector('#key-form').hidden === {json.dumps(key == 'sk-right')}")
        page.until("document.querySelector('#model').value")
        ask(page, "Hello")
        assert page.text(".body") == "Welcome."
        assert all("sk-" not in request["url"] for request in page.requests)


def test_a_busy_server_says_when_to_try_again(open_page: Open) -> None:
    limits = Limits(running=1, queue=0)
    with scripted(Answer("word " * 2000, delay=0.01), "Here you are.", limits=limits) as (url, _, _):
        other = open_page(url)
        ask(other, "Take the only place.", "document.querySelector('.body').textContent.length > 5")
        page = open_page(url, expect=("429",))
        ask(page, "Me too.")
        assert "busy" in page.text(".problem strong") and "try again" in page.text(".problem p")
        assert "The server asks to wait" in page.text(".problem .hint")
        other.click("#stop")
        other.until(DONE)
        page.until("document.querySelector('.problem .hint').textContent === 'You can try again now'")
        page.click(".problem .retry")
        page.until(f"{DONE} && document.querySelector('.body')?.textContent === 'Here you are.'")


def test_nothing_is_lost_when_the_server_stops(open_page: Open) -> None:
    with scripted(Answer("One two three.", delay=0.05, error=RuntimeError("a secret"))) as (url, _, _):
        page = open_page(url, expect=("ERR_CONNECTION", "ERR_EMPTY", "ERR_INCOMPLETE"))
        ask(page, "Break in the middle.")
        assert page.text(".body") == "One two three." and page.text(".problem strong")
        assert "secret" not in page.js("document.body.innerText")
    ask(page, "Is anybody there?")
    assert "cannot be reached" in page.text(".problem strong")
    page.until("document.querySelector('#state').dataset.state === 'lost'")
    assert "keeps looking" in page.text("#notice")
    page.fill("#question", "A draft.")
    with scripted("Back again.", port=int(url.rstrip("/").rpartition(":")[2])):
        page.until("document.querySelector('#state').dataset.state === 'ready'")
        page.click(".problem .retry")
        page.until(f"{DONE} && [...document.querySelectorAll('.body')].at(-1).textContent === 'Back again.'")
        assert page.js("document.querySelector('#question').value") == "A draft."
        page.go(url)
        page.until("document.querySelectorAll('.turn').length === 4")
        assert page.js("document.querySelector('#question').value") == "A draft."


MARKDOWN = (
    "# Title\n\nSome **bold** words and `code`.\n\n- one\n  - inner\n- two\n\n```python\n"
    + "x = 1  # long " * 30
    + "\n```\n> quote"
)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_words_can_be_read_and_a_phone_does_not_scroll_sideways(open_page: Open, dark: bool) -> None:
    call = Answer(calls=(ToolCall("look", {"a": "b" * 300}),), checked=False)
    with scripted(MARKDOWN, "wide" * 200, call) as (url, _, _):
        page = open_page(url, width=360, height=740, dark=dark)
        for question in ("Short?", "long" * 200, "Tool?"):
            ask(page, question)
            assert page.js("document.documentElement.scrollWidth") == 360
            assert page.js("document.querySelector('#conversation').scrollWidth <= 360")
            ratio, where = worst_contrast(page)
            assert ratio >= 4.5, where
        assert page.count(".body ul ul li") == 1
        page.click("#open-settings")
        page.until("document.querySelector('#settings').classList.contains('open')")
        page.click("#schema-example")
        page.click("#tools-example")
        assert page.js("document.documentElement.scrollWidth") == 360
        ratio, where = worst_contrast(page)
        assert ratio >= 4.5, where
        page.press("Escape")
        assert page.js("document.activeElement.id") == "open-settings"
        # Wide screens show the settings at all times, and focus is seen.
        page.look(width=1280, height=860, dark=dark)
        assert page.js("document.querySelector('#settings').getBoundingClientRect().right") == 1280
        page.js("document.querySelector('#question').focus()")
        page.press("Tab")
        assert page.js("getComputedStyle(document.activeElement).outlineStyle") == "solid"
