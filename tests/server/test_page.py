"""The page on which to try a server: what it needs of it, and where there is a browser, what it shows."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator

import onnx
import pytest
from decoders import Unsharded, decoder
from partc.compiler.pipeline import compile_model
from server_case import LETTERS, LocalServer, until, write_tokenizer

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    folder = tmp_path_factory.mktemp("served")
    onnx.save(decoder(), folder / "model.onnx")
    (folder / "plan.yaml").write_text("ranks: 1\ngenerate: {slots: 2, length: 250, chunk: 4}\n")
    compile_model(folder / "model.onnx", folder / "plan.yaml", folder / "build")
    with LocalServer(folder / "build", write_tokenizer(folder)) as found:
        yield found


def test_the_page_needs_nothing_of_other_servers(server: LocalServer) -> None:
    status, headers, body = server.request("GET", "/")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "default-src 'none'" in headers["content-security-policy"]
    text = body.decode()
    assert not re.search(r"(src|href)=|https?://|@import|url\(", text)
    for path in re.findall(r'"(/v1/[\w/]+)"', text):
        assert server.request("GET", path)[0] in (200, 405), path


@pytest.mark.skipif(BROWSER is None, reason="there is no browser")
def test_the_page_shows_an_answer_as_it_comes(server: LocalServer) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    wanted = "".join(LETTERS[token] for token in Unsharded(decoder()).tokens([0, 1, 2], 20))
    with playwright.sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_page()
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.goto(server.front.address)
        page.wait_for_selector("body[data-ready]")
        assert page.text_content("#model") == "model.onnx"
        page.uncheck("#chat")
        page.fill("#prompt", LETTERS[:3])
        page.fill("#max_tokens", "20")
        page.click("#go")
        page.wait_for_selector("#state:has-text('made')")
        assert page.text_content("#answer") == wanted
        assert page.text_content("#state") == "ended: length, 3 tokens read, 20 made"
        page.check("#chat")
        page.click("#go")
        page.wait_for_selector("#state:has-text('5 tokens read')")  # with the letters of the template
        make = server.generator.make
        server.generator.make = lambda *given: (time.sleep(0.02), make(*given))[1]  # type: ignore[method-assign]
        page.uncheck("#chat")
        page.fill("#max_tokens", "240")
        page.click("#go")
        page.click("#stop")
        page.wait_for_selector("#state:text-is('stopped')")
        until(lambda: server.batch.slots.used == 0)
        page.fill("#prompt", "#")
        page.click("#go")
        page.wait_for_selector("#state.wrong")
        assert "no token" in page.text_content("#state")
        browser.close()
    assert [one for one in problems if "400" not in one] == []
