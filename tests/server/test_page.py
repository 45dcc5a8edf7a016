"""The page on which to try a server: what it needs of it, and where there is a browser, what it shows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import onnx
import pytest
from browser import Browser, chromium
from decoders import Unsharded, decoder
from partc.compiler.pipeline import compile_model
from server_case import LETTERS, LocalServer, write_tokenizer
from waiting import until

PROGRAM = chromium()


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    onnx.save(decoder(), folder / "model.onnx")
    (folder / "plan.yaml").write_text("ranks: 1\ngenerate: {slots: 2, length: 250, chunk: 4}\n")
    compile_model(folder / "model.onnx", folder / "plan.yaml", folder / "build")
    return folder / "build"


@pytest.fixture(scope="module")
def server(build: Path) -> Iterator[LocalServer]:
    with LocalServer(build, write_tokenizer(build.parent)) as found:
        yield found


def test_the_page_needs_nothing_of_other_servers(server: LocalServer) -> None:
    status, headers, body = server.request("GET", "/")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "default-src 'none'" in headers["content-security-policy"]
    text = body.decode()
    assert not re.search(r"(src|href)=|https?://|@import|url\(", text)
    for path in re.findall(r'"(/v1/[\w/]+)"', text):
        assert server.request("GET", path)[0] in (200, 405), path


@pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium here, in which the page is tried")
def test_the_page_shows_an_answer_as_it_comes(server: LocalServer) -> None:
    wanted = "".join(LETTERS[token] for token in Unsharded(decoder()).tokens([0, 1, 2], 20))
    assert PROGRAM is not None
    with Browser(PROGRAM) as browser:
        state = "document.querySelector('#state').textContent"
        browser.open(server.front.address, "document.body?.dataset.ready !== undefined")
        assert browser.evaluate("document.querySelector('#model').textContent") == "model.onnx"
        browser.fill("#chat", False)
        browser.fill("#prompt", LETTERS[:3])
        browser.fill("#max_tokens", "20")
        browser.click("#go")
        browser.wait(f"{state}.includes('made')")
        assert browser.evaluate("document.querySelector('#answer').textContent") == wanted
        assert browser.evaluate(state) == "ended: length, 3 tokens read, 20 made"
        browser.fill("#chat", True)
        browser.click("#go")
        browser.wait(f"{state}.includes('5 tokens read')")  # with the letters of the template
        begin, stopped = server.generator.begin, Event()
        server.generator.begin = lambda *given: (stopped.wait(60), begin(*given))[1]  # type: ignore[method-assign]
        browser.fill("#chat", False)
        browser.fill("#max_tokens", "240")
        browser.click("#go")
        browser.click("#stop")
        browser.wait(f"{state} === 'stopped'")
        stopped.set()
        until(lambda: server.batch.slots.used == 0)
        browser.fill("#prompt", "#")
        browser.click("#go")
        browser.wait("document.querySelector('#state')?.classList.contains('wrong')")
        assert "no token" in browser.evaluate(state)
        assert browser.errors == []


@pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium here, in which the page is tried")
def test_the_page_asks_for_the_key(build: Path) -> None:
    assert PROGRAM is not None
    with LocalServer(build, api_key="secret") as server, Browser(PROGRAM) as browser:
        browser.open(server.front.address, "document.querySelector('#state')?.classList.contains('wrong')")
        for key, is_wrong in (("other", "true"), ("secret", "false")):
            browser.fill("#key", key)
            browser.evaluate("document.querySelector('#key').dispatchEvent(new Event('change'))")
            browser.wait(f"document.querySelector('#state').classList.contains('wrong') === {is_wrong}")
        browser.wait("document.body.dataset.ready !== undefined")
        browser.fill("#prompt", "1, 2")
        browser.click("#go")
        browser.wait("document.querySelector('#state').textContent.includes('made')")
