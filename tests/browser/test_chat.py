"""The chat and the API's page in a real browser, against a real server of two hash models that wants a key."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.browser.chromium import Page, drive, needs_chromium
from tests.serving import RunningServer, serving

pytestmark = needs_chromium

KEY = "a-key-of-the-chat-tests"
CONFIG = """
served_aliases = ["gamma"]
[kv]
blocks = 256
[[models]]
name = "alpha"
model = "hash:a"
mixed = 1
[[models]]
name = "beta"
model = "hash:b"
prefill = 1
decode = 1
"""
ANSWER = "([...document.querySelectorAll('.turn:not(.user)')].at(-1)?.textContent ?? '')"
ANSWERED = "document.querySelectorAll('.timings').length === {count} && !document.querySelector('#send').disabled"
TITLES = "[...document.querySelectorAll('#chats button:first-child')].map(each => each.textContent)"
USER_TURNS = "[...document.querySelectorAll('.turn.user')].map(each => each.textContent)"

HOSTILE = """# Title &amp; <b>bold</b>

- [x] *done* with `a < b`

```html
<script>window.harmed = 1</script>
```

<img src="x" onerror="window.harmed = 2"> <script>window.harmed = 3</script>

[press](javascript:window.harmed=4) [fine](https://example.com/?a=1) ![picture](http://example.com/a.png)

|a|b|
|-|-|
|1|<iframe srcdoc="x"></iframe>|

<svg onload="window.harmed = 5">
"""
CHANGED_BODY = """{{ const real = window.fetch; window.sent = [];
    window.fetch = (path, options) => {{
        if (!options?.body) return real(path, options);
        const body = {{...JSON.parse(options.body), ...{fields}}};
        sent.push(body);
        return real(path, {{...options, body: JSON.stringify(body)}});
    }}; }}"""
"""Note the bodies that the page sends in `sent`, with further fields."""


def answer_with(text: str) -> str:
    """Return a script that makes the model answer with a text: the page's own requests get a constraint."""
    return CHANGED_BODY.format(fields=json.dumps({"max_tokens": 4000, "structured_outputs": {"choice": [text]}}))


def fill(**values: str) -> str:
    """Return a script that fills fields of the page, by their ids."""
    return "; ".join(f"document.querySelector('#{name}').value = {value!r}" for name, value in values.items())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    config = tmp_path_factory.mktemp("chat") / "baton.toml"
    config.write_text(CONFIG)
    with serving("--config", str(config), "--api-key", KEY) as running:
        yield running


@contextmanager
def stopped_decode(server: RunningServer) -> Iterator[None]:
    """Stop the decode worker of the second model: an answer stays at its first token."""
    headers = {"authorization": f"Bearer {KEY}"}
    workers = httpx.get(f"{server.url}/cluster?model=beta", headers=headers).raise_for_status().json()["workers"]
    pid = next(each["pid"] for each in workers if each["role"] == "decode")
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def sign_in(page: Page) -> None:
    """Give the key that the page asks for, as a user does."""
    await page.until("!document.querySelector('#key').hidden")
    await page.run("document.querySelector('#key').focus()")  # the header moves while the page loads
    await page.type(KEY)
    await page.key("Enter")
    await page.until("document.querySelector('#model').options.length === 3")
    page.problems.clear()  # the browser notes the 401 before the key


async def ask(page: Page, text: str) -> None:
    await page.press("#text")
    await page.type(text)
    await page.key("Enter")


def test_conversations_are_streamed_timed_and_kept(server: RunningServer, tmp_path: Path) -> None:
    """The decode worker is stopped until the page shows the first token: an answer in one piece would not show."""

    async def visit(page: Page) -> None:
        await sign_in(page)
        await page.run("document.querySelector('#settings').open = true")
        await page.run(fill(model="beta", temperature="0", max_tokens="60"))
        await page.run("document.querySelector('#settings').dispatchEvent(new Event('change'))")
        with stopped_decode(server):
            await ask(page, "Count to a hundred")
            await page.until(f"{ANSWER}.length > 0")
            first = await page.run(ANSWER)
            assert await page.run("document.querySelector('#send').disabled"), "the answer came in one piece"
        await page.until(ANSWERED.format(count=1))
        whole = await page.run(ANSWER)
        assert len(whole) > len(first)
        timings = await page.run("document.querySelector('.timings').textContent")
        assert "prefill-0 → decode-0" in timings
        assert "60 tokens" in timings
        assert "cut off at the limit of tokens" in timings
        await ask(page, "and again")
        await page.until(ANSWERED.format(count=2))
        assert "cached 0 tokens" not in await page.run("document.querySelectorAll('.timings')[1].textContent")

        await page.press("#new")
        assert await page.run(USER_TURNS) == []
        await ask(page, "Another talk")
        await page.until(ANSWERED.format(count=1))
        await page.open(f"{server.url}/chat")
        await sign_in(page)
        await page.until(f"{TITLES}.length === 2")
        assert await page.run(TITLES) == ["Another talk", "Count to a hundred"]
        await page.run("document.querySelectorAll('#chats button:first-child')[1].click()")
        assert await page.run(USER_TURNS) == ["Count to a hundred", "and again"]
        assert await page.run("document.querySelectorAll('.timings').length") == 2
        assert await page.run("document.querySelector('#max_tokens').value") == "60"
        await page.run("document.querySelectorAll('#chats [aria-label^=\"Delete Count\"]')[0].click()")
        assert await page.run(TITLES) == ["Another talk"]
        assert await page.run(USER_TURNS) == []
        assert await page.run("document.querySelector('.error')") is None

    drive(f"{server.url}/chat", tmp_path, visit)


def test_settings_reach_the_server_and_an_answer_can_be_stopped(server: RunningServer, tmp_path: Path) -> None:
    """A refused question returns to its field, with the server's words."""

    async def visit(page: Page) -> None:
        await sign_in(page)
        await page.run(CHANGED_BODY.format(fields="{}"))
        await page.run(fill(model="beta", system="Be short", temperature="0", top_p="0"))
        await ask(page, "refused")
        await page.until("document.querySelector('.error') !== null")
        assert "top_p must be a number above 0" in await page.run("document.querySelector('.error').textContent")
        assert await page.run("document.querySelector('#text').value") == "refused"
        page.problems.clear()  # the browser notes the status 400
        await page.run(fill(top_p="", text=""))
        with stopped_decode(server):
            await ask(page, "go on")
            await page.until(f"{ANSWER}.length > 0 && document.querySelector('#send').disabled")
            await page.key("Escape")
            await page.until(ANSWERED.format(count=1))
        assert "stopped" in await page.run("document.querySelector('.timings').textContent")
        assert await page.run("sent.at(-1)") == {
            "model": "beta",
            "temperature": 0,
            "messages": [{"role": "system", "content": "Be short"}, {"role": "user", "content": "go on"}],
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    drive(f"{server.url}/chat", tmp_path, visit)


def test_markdown_of_a_model_is_shown_and_never_runs(server: RunningServer, tmp_path: Path) -> None:
    """The model answers with HTML and scripts; once from the stream, once from the kept conversations."""

    async def check(page: Page) -> None:
        assert await page.run("window.harmed") is None
        assert await page.run("document.querySelectorAll('#log :is(script, img, iframe, svg, b)').length") == 0
        assert await page.run("document.querySelector('.turn h3').textContent") == "Title & <b>bold</b>"
        assert await page.run("document.querySelector('.turn li').textContent") == "☑ done with a < b"
        assert await page.run("document.querySelector('.turn pre').textContent") == "<script>window.harmed = 1</script>"
        assert await page.run("[...document.querySelectorAll('.turn a')].map(each => each.href)") == [
            "https://example.com/?a=1",
            "http://example.com/a.png",
        ]
        assert await page.run("document.querySelectorAll('.turn td')[1].textContent") == '<iframe srcdoc="x"></iframe>'

    async def visit(page: Page) -> None:
        await page.grant("clipboardReadWrite", "clipboardSanitizedWrite")
        await sign_in(page)
        await page.run(answer_with(HOSTILE))
        await ask(page, "<img src=x onerror='window.harmed = 6'>")
        await page.until(ANSWERED.format(count=1))
        await check(page)
        await page.press(".code-head .act")
        await page.until("document.querySelector('.code-head .act').textContent === 'copied'")
        assert await page.run("navigator.clipboard.readText()") == "<script>window.harmed = 1</script>"
        await page.open(f"{server.url}/chat")
        await sign_in(page)
        await page.until(f"{TITLES}.length === 1")
        await page.run("document.querySelector('#chats button').click()")
        await check(page)
        deep = await page.run(
            "import('/static/markdown.js').then(page => { const box = document.createElement('div');"
            " new page.MarkdownView(box).show('>'.repeat(50000) + ' deep'); return box.textContent.length; })"
        )
        assert deep >= len(" deep")

    drive(f"{server.url}/chat", tmp_path, visit)


def test_the_chat_fits_every_width_in_light_and_dark(server: RunningServer, tmp_path: Path) -> None:
    async def visit(page: Page) -> None:
        await sign_in(page)
        await page.run(answer_with("```\n" + "a long line " * 12 + "\n```\n" + "word" * 30))
        await ask(page, "wide" * 30)
        await page.until(ANSWERED.format(count=1))
        for scheme, color in (("light", "rgb(0, 0, 0)"), ("dark", "rgb(255, 255, 255)")):
            await page.prefer(scheme)
            assert await page.run("getComputedStyle(document.body).color") == color
            for width in (360, 780, 1280):
                await page.resize(width)
                assert await page.run("document.documentElement.scrollWidth") <= width
                assert await page.run("document.querySelector('#log').clientHeight") >= 96
                (tmp_path / f"chat-{scheme}-{width}.png").write_bytes(await page.picture())

    drive(f"{server.url}/chat", tmp_path, visit)


def test_the_dashboard_shows_and_changes_the_chosen_model(server: RunningServer, tmp_path: Path) -> None:
    async def visit(page: Page) -> None:
        await page.run("document.querySelector('#key').focus()")
        await page.type(KEY)
        await page.key("Enter")
        await page.until("document.querySelector('#model').options.length === 3")
        page.problems.clear()  # the browser notes the 401 before the key
        await page.until("document.querySelectorAll('#workers tr').length === 1")
        choose = "const choice = document.querySelector('{0}'); choice.value = '{1}';"
        await page.run(f"{{ {choose.format('#model', 'beta')} choice.dispatchEvent(new Event('change')); }}")
        await page.until("document.querySelectorAll('#workers tr').length === 2")
        await page.run(f"{{ {choose.format('#workers select', 'mixed')} choice.dispatchEvent(new Event('change')); }}")
        await page.until("document.querySelectorAll('#workers .role.mixed').length === 1")

    drive(server.url, tmp_path, visit)


def test_a_further_name_is_the_first_model(server: RunningServer) -> None:
    with httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {KEY}"}) as client:
        assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["alpha", "beta", "gamma"]
        body = {"prompt": "a", "model": "gamma", "max_tokens": 1}
        assert client.post("/v1/completions", json=body).raise_for_status().json()["model"] == "alpha"


def test_the_page_of_the_api_shows_fields_and_sends_requests(server: RunningServer, tmp_path: Path) -> None:
    """Every operation of the document is there, without a file from elsewhere."""

    async def visit(page: Page) -> None:
        await page.until("document.querySelector('#state').textContent !== 'loading'")  # its script takes a key now
        await page.run("document.querySelector('#key').focus()")  # the header moves while the page loads
        await page.type(KEY)
        await page.key("Enter")
        await page.until("document.querySelectorAll('details').length > 20")
        page.problems.clear()  # the browser notes the 401 before the key
        tokenize = "[...document.querySelectorAll('details')].find(each => each.textContent.includes(' /tokenize '))"
        await page.run(f"{tokenize}.open = true")
        await page.until(f"{tokenize}.querySelector('button') !== null")
        assert "add_special_tokens" in await page.run(f"{tokenize}.querySelector('table').textContent")
        await page.run(f"{tokenize}.querySelector('button').click()")
        await page.until(f"{tokenize}.querySelector('.answer').textContent.startsWith('200')")
        assert '"count":5' in await page.run(f"{tokenize}.querySelector('.answer').textContent")
        for width in (360, 1280):
            await page.resize(width)
            assert await page.run("document.documentElement.scrollWidth") <= width

    drive(f"{server.url}/docs", tmp_path, visit)
