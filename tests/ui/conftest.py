"""A server of the page in this process, and the machine's own chromium."""

import threading
import time
from types import SimpleNamespace

import pytest

TOKEN = "token-of-these-tests"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chromium-headless-shell")
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """`.url`, `.port`, `.token`, `.jobs`, and `.runs`, the folder of run folders."""
    pytest.importorskip("starlette", reason="the page's server is not installed: memfit[ui]")
    uvicorn = pytest.importorskip(
        "uvicorn", reason="the page's server is not installed: memfit[ui]"
    )
    from memfit.ui import app
    from memfit.ui.jobs import Jobs

    jobs = Jobs()
    runs = tmp_path_factory.mktemp("runs")
    with app.listen(0) as listener:
        served = uvicorn.Server(app.configure(app.make_app(TOKEN, runs, jobs)))
        thread = threading.Thread(target=served.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not served.started:
            time.sleep(0.01)
        port = listener.getsockname()[1]
        yield SimpleNamespace(
            url=f"http://127.0.0.1:{port}", port=port, token=TOKEN, runs=runs, jobs=jobs
        )
        jobs.close()
        served.should_exit = True
        thread.join(10)


@pytest.fixture(scope="session")
def browser():
    """Headless chromium, driven by Playwright; skipped where the machine has none."""
    import shutil

    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("no chromium on this machine")
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found, args=list(FLAGS))
        yield browser
        browser.close()
