"""The page in headless Chromium, over a server with a FakeEngine."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from PIL import Image

from shardwise.config import ServeConfig, load_vision_config
from shardwise.server.media import Media
from tests.browser.conftest import Page, serving
from tests.fake_engine import READY, FakeEngine
from tests.unit.server_fixtures import MODEL, saying, tokenizer
from tests.unit.test_ui import MEMORY, STATS

OPEN = Callable[[str], Page]
CODE = "let x = '<b>é</b>';\n\nif (x) y();"
REPLY = f"I should be careful.\n</think>\n\nUse **this** `code`:\n```js\n{CODE}\n```\n<img src=x onerror=alert(1)> done"


def engine(text: str = REPLY) -> FakeEngine:
    made = FakeEngine(saying(text))
    made.ready = msgspec.structs.replace(READY, ranks=2, memory=MEMORY)
    made.stats = STATS
    return made


def settled(page: Page) -> bool:
    return page.one("#send").is_displayed() and bool(page.all(".regenerate"))


def test_a_turn_and_what_a_reload_keeps(page: OPEN) -> None:
    with serving(engine()) as url:
        shown = page(url)
        shown.ask("How do I do it?")
        shown.until(lambda: settled(shown))
        for _ in range(2):
            assert shown.text(".message.user .text") == "How do I do it?"
            assert shown.one(".thought .plain").get_attribute("textContent") == "I should be careful."
            assert not shown.one(".thought .plain").is_displayed()
            assert shown.text(".code pre") == CODE
            assert shown.text(".message.assistant .text p code") == "code"
            assert shown.text(".message.assistant strong") == "this"
            assert "<img src=x onerror=alert(1)> done" in shown.text(".message.assistant .text")
            assert not shown.all(".message.assistant .text img")
            assert "tokens" in shown.text(".facts")
            shown.driver.refresh()
            shown.until(lambda: settled(shown))
        shown.one("#new").click()
        assert not shown.all(".message")
        shown.driver.refresh()
        shown.until(lambda: shown.one("#empty").is_displayed())
        assert not shown.all(".message")


@pytest.mark.parametrize("how", ["button", "key"])
def test_stop_ends_the_answer_and_the_work(page: OPEN, how: str) -> None:
    slow = engine("</think>\n\n" + "again and " * 100)
    slow.delay_s = 0.03
    with serving(slow) as url:
        shown = page(url)
        shown.ask("Say it")
        shown.until(lambda: "again and" in shown.text(".message.assistant .text"))
        if how == "button":
            shown.one("#stop").click()
        else:
            shown.one("body").send_keys("\ue00c")
        shown.until(lambda: settled(shown))
        shown.until(lambda: slow.cancelled)
        assert "stopped" in shown.text(".facts")
        assert len(shown.text(".message.assistant .text")) < 900
        slow.delay_s = 0
        shown.one(".regenerate").click()
        shown.until(lambda: settled(shown) and shown.text(".message.assistant .text").count("again") == 100)
        assert len(shown.all(".message")) == 2


def test_an_error_of_the_api_is_shown_where_it_happened(page: OPEN) -> None:
    broken = engine()
    broken.refuse = ("the prompt has 9000 tokens and 512 fit", "messages")
    with serving(broken) as url:
        shown = page(url)
        shown.ask("Much text")
        shown.until(lambda: settled(shown))
        assert "the prompt has 9000 tokens and 512 fit" in shown.text(".message.assistant .error")
        assert "Request " in shown.text(".message.assistant .error")
        broken.refuse, broken.fail_after = None, 3
        shown.one(".regenerate").click()
        shown.until(lambda: settled(shown) and "a rank died" in shown.text(".error"))
        broken.fail_after = None
        shown.one(".regenerate").click()
        shown.until(lambda: settled(shown) and shown.text(".code pre") == CODE)
        assert not shown.one(".error").is_displayed()


def test_parameters_and_the_key(page: OPEN) -> None:
    guarded = engine()
    with serving(guarded, api_key="secret") as url:
        shown = page(url)
        shown.until(lambda: shown.text("#status") == "API key needed")
        shown.ask("Hello")
        shown.until(lambda: settled(shown))
        assert "API key" in shown.text(".error p")
        shown.one(".error button").click()
        shown.one("#api-key").send_keys("secret")
        shown.one("#system").send_keys("Be brief.")
        shown.one("#temperature").send_keys("0.25")
        shown.one("#max_tokens").send_keys("4")
        shown.one("#enable_thinking").click()
        shown.one("#settings .primary").click()
        shown.until(lambda: shown.text("#status") == MODEL.name)
        shown.one(".regenerate").click()
        shown.until(lambda: settled(shown) and not shown.one(".error").is_displayed())
        _, prompt, sampling = guarded.requests[-1]
        assert (sampling.temperature, sampling.max_tokens) == (0.25, 4)
        assert "cut at the most tokens" in shown.text(".facts")
        kept = shown.driver.execute_script("return [JSON.stringify(localStorage), sessionStorage['shardwise.key']]")
        assert kept[1] == "secret"
        assert "secret" not in kept[0]
        text = tokenizer().decode(prompt)
        assert "Be brief." in text
        assert text.endswith("</think>\n\n")


def test_the_live_view(page: OPEN) -> None:
    with serving(engine()) as url:
        shown = page(url)
        shown.one("#view-live").click()
        shown.until(lambda: len(shown.all(".rank")) == 2)
        assert "2 running" in shown.text("#tiles")
        assert "3 waiting" in shown.text("#tiles")
        first = shown.text(".rank:first-child")
        for words in ("Rank 0", "experts\n300 B", "state, used\n20 B", "KV, free\n4.00 KiB"):
            assert words in first
        assert "on another host" in shown.text(".rank:last-child")


def test_pictures_are_sent_and_kept(page: OPEN, tmp_path: Path) -> None:
    """Only where the model sees: without a vision tower there is no button."""
    vision = load_vision_config(MODEL)
    assert vision
    media = Media.load_processor(ServeConfig(model=str(MODEL)), vision)
    Image.new("RGB", (64, 96), "red").save(tmp_path / "red.png")
    seeing = engine("</think>\n\nRed.")
    with serving(seeing, media=media) as url:
        shown = page(url)
        shown.until(lambda: shown.one("#attach").is_displayed())
        shown.one("#files").send_keys(str(tmp_path / "red.png"))
        shown.until(lambda: len(shown.all("#pictures img")) == 1)
        shown.ask("Which colour?")
        shown.until(lambda: settled(shown))
        assert shown.text(".message.assistant .text") == "Red."
        assert len(seeing.pictures) == 1
        assert not shown.one("#pictures").is_displayed()
        shown.driver.refresh()
        shown.until(lambda: settled(shown))
        assert shown.one(".message.user img").get_property("naturalHeight") == 96
    media.close()
    with serving(engine()) as url:
        shown = page(url)
        shown.until(lambda: shown.text("#status") == MODEL.name)
        assert not shown.one("#attach").is_displayed()


def test_calls_are_shown_and_take_results(page: OPEN) -> None:
    call = {"id": "call_1", "name": "get_weather", "arguments": '{"city": "Sofia"}'}
    said = [
        {"role": "user", "content": "How is the weather?"},
        {"role": "assistant", "content": "", "reasoning": "", "calls": [call], "finish": "tool_calls"},
    ]
    told = engine("</think>\n\nIt is sunny.")
    with serving(told) as url:
        shown = page(url)
        shown.driver.execute_script("localStorage['shardwise.conversation'] = arguments[0]", json.dumps(said))
        shown.driver.refresh()
        shown.until(lambda: shown.text(".call summary code") == "get_weather")
        assert json.loads(shown.text(".call pre")) == {"city": "Sofia"}
        shown.one(".call textarea").send_keys("sunny, 25 degrees")
        shown.one(".calls button").click()
        shown.until(lambda: settled(shown) and "It is sunny." in shown.text(".message:last-child .text"))
        assert shown.text(".message.tool") == "Result of get_weather\nsunny, 25 degrees"
        prompt = tokenizer().decode(told.requests[-1][1])
        assert "<parameter=city>\nSofia\n</parameter>" in prompt
        assert "<tool_response>\nsunny, 25 degrees\n</tool_response>" in prompt


def evaluate(shown: Page, module: str, text: str) -> Any:
    """`text` in JavaScript, where `m` is one of the page's modules."""
    ends = f".then((m) => done(JSON.stringify({text}))).catch((error) => done(JSON.stringify(String(error))))"
    return json.loads(shown.driver.execute_async_script(f"const done = arguments[0]; import('/ui/{module}'){ends}"))


def test_the_parts_that_compute(page: OPEN) -> None:
    """Calls that come in pieces, Markdown that is cut anywhere, quantiles of histograms."""
    with serving(engine()) as url:
        shown = page(url)
        parts = [
            {"index": 0, "id": "a", "function": {"name": "f", "arguments": ""}},
            {"index": 0, "function": {"arguments": '{"x": '}},
            {"index": 1, "id": "b", "function": {"name": "g", "arguments": "{}"}},
            {"index": 0, "function": {"arguments": "1}"}},
        ]
        chunks = json.dumps([{"choices": [{"delta": {"tool_calls": [part]}}]} for part in parts])
        start = "{calls: [], content: '', reasoning: ''}"
        folded = evaluate(shown, "api.js", f"({chunks}).reduce((a, c) => (m.fold(a, c), a), {start})")
        assert [(call["name"], call["arguments"]) for call in folded["calls"]] == [("f", '{"x": 1}'), ("g", "{}")]
        text = "a\nb\n\nc\n# H\n| x |\n| y |\n~~~py\n```\n\n# no\n~~~\nend\n```open"
        kinds = evaluate(shown, "markdown.js", f"m.blocks({json.dumps(text)}).map((b) => [b.kind, b.lines.join('+')])")
        assert kinds == [
            ["text", "a+b"], ["text", "c"], ["heading", "H"], ["table", "| x |+| y |"], ["code", "```++# no"],
            ["text", "end"], ["code", ""],
        ]  # fmt: skip
        histogram = json.dumps({"bounds_s": [1, 2, 4], "counts": [0, 2, 4, 4]})
        assert evaluate(shown, "monitor.js", f"m.quantile({histogram}, null, 0.5)") == 2
        assert evaluate(shown, "monitor.js", f"m.quantile({histogram}, null, 0.75)") == 3
        assert evaluate(shown, "monitor.js", f"m.quantile({histogram}, {histogram}, 0.5)") is None
