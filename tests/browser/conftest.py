"""A server over a FakeEngine in a thread, and headless Chromium where it is installed."""

import asyncio
import contextlib
import shutil
import socket
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest
import uvicorn

from tests.fake_engine import FakeEngine
from tests.unit.server_fixtures import make_app

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
    "--window-size=1000,800",
)  # fmt: skip


@contextlib.contextmanager
def serving(engine: FakeEngine, **options: Any) -> Generator[str, None, None]:
    """The address of a server that answers with `engine`."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(make_app(engine, **options), log_level="warning", lifespan="off")
        config.timeout_graceful_shutdown = 2
        server = uvicorn.Server(config)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        finally:
            server.should_exit = True
            thread.join(10)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A WebDriver."""
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("needs Chromium and its driver (Debian: apt-get install chromium chromium-driver)")
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium (pip install selenium)")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    driver.set_script_timeout(10)
    try:
        yield driver
    finally:
        driver.quit()


class Page:
    """The page at one address, with what tests ask of it."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def one(self, css: str) -> Any:
        return self.driver.find_element("css selector", css)

    def all(self, css: str) -> list[Any]:
        return self.driver.find_elements("css selector", css)

    def text(self, css: str) -> str:
        """The text of all that match now; if one is replaced while it is read, of those that match then."""
        return self.until(lambda: ("\n".join(each.text for each in self.all(css)),))[0]

    def until(self, condition: Callable[[], Any], seconds: float = 10) -> Any:
        """What `condition` gives, once it is true; an element that was just replaced is looked for again."""
        from selenium.common.exceptions import WebDriverException
        from selenium.webdriver.support.ui import WebDriverWait

        wait = WebDriverWait(self.driver, seconds, 0.05, ignored_exceptions=[WebDriverException])
        return wait.until(lambda _: condition())

    def ask(self, text: str) -> None:
        from selenium.webdriver.common.keys import Keys

        self.one("#prompt").send_keys(text, Keys.ENTER)

    def faults(self) -> list[str]:
        """What the console complained of since the last call, but answers that tests provoke."""
        entries = self.driver.get_log("browser")
        return [each["message"] for each in entries if each["level"] == "SEVERE" and "status of" not in each["message"]]


@pytest.fixture
def page(browser: Any) -> Iterator[Callable[[str], Page]]:
    """Opens an address afresh, and checks that the console stayed clean."""
    opened: list[Page] = []

    def open_page(url: str) -> Page:
        browser.get(url)
        browser.execute_script("localStorage.clear(); sessionStorage.clear()")
        browser.get("about:blank")
        browser.get(url)
        opened.append(Page(browser))
        return opened[-1]

    yield open_page
    faults = [fault for each in opened for fault in each.faults()]
    browser.get("about:blank")
    assert not faults
