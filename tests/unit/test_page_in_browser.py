"""The report's pages in headless Chromium: one browser for all tests of this file."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_runs import make_run, make_samples

from hvd_bert.tools.report import runs_page
from hvd_bert.tools.report.__main__ import main
from hvd_bert.tools.runs import record
from hvd_bert.tools.runs.record import LineArrays

webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium (env/setup.sh --dev)")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
without_one = CHROMIUM is None or DRIVER is None
reason = "needs Debian's packages chromium and chromium-driver"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(without_one, reason=reason)]
HOSTILE = "a</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">\x1b[31m"
OPENS_S = 3.0


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    folder = tmp_path_factory.mktemp("browser")
    for flag in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", f"user-data-dir={folder}"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    opened = webdriver.Chrome(options=options, service=webdriver.ChromeService(str(DRIVER)))
    opened.set_page_load_timeout(240)
    opened.set_script_timeout(240)
    yield opened
    opened.quit()


def show(browser: Any, page: Path, width: int = 1100, scheme: str = "light") -> None:
    """Open a page on a screen of this width."""
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    for log in ("browser", "performance"):
        browser.get_log(log)  # forgets what an earlier page did
    browser.get(page.as_uri())


def draw_all(browser: Any, at_most: int = 100) -> list[dict[str, Any]]:
    """Scroll to each chart until it is drawn. Returns title and plotly's traces of each."""
    return browser.execute_async_script(  # type: ignore[no-any-return]
        """
        const [atMost, done] = arguments;
        (async () => {
          const found = [];
          for (const figure of [...document.querySelectorAll("figure.chart")].slice(0, atMost)) {
            figure.scrollIntoView();
            const plot = figure.querySelector(".plot");
            while (!plot.data || !plot.querySelector(".main-svg")) await new Promise(requestAnimationFrame);
            const traces = plot.data.map(({ name, x, y }) => ({ name, x: [...x], y: [...y] }));
            found.push({ title: figure.querySelector("figcaption").textContent, traces });
          }
          done(found);
        })();
        """,
        at_most,
    )


def requests(browser: Any) -> list[str]:
    """Addresses that the page asked for, other than itself."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [message["params"] for message in messages if message["method"] == "Network.requestWillBeSent"]
    addresses = [request["request"]["url"] for request in sent if request.get("type") != "Document"]
    return [address for address in addresses if not address.startswith("data:")]


def hostile_run(folder: Path) -> Path:
    name = HOSTILE.replace("/", "\u2215") + os.fsdecode(b"\xff")
    run = make_run(folder / name, "horovod", 2, scores=(60.0, 70.0))
    *steps, _ = (run / "metrics.jsonl").read_text().splitlines()
    evaluations = [{"step": 20, "eval_f1": 30.0}, {"step": 40, "eval_f1": 50.0, "eval_loss": 1.5}]
    (run / "metrics.jsonl").write_text("\n".join([*steps, *map(json.dumps, evaluations)]))
    make_samples(run, question=HOSTILE + "\ud800")
    event = {"event": "warning", "ranks": [0], "message": HOSTILE}
    (run / "events.jsonl").write_text(json.dumps(event) + "\n")
    (run / "train_config.yaml").write_text(json.dumps({"learning_rate": 1e-3, "train_file": HOSTILE}))
    return run


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of one run whose texts try to become markup."""
    folder = tmp_path_factory.mktemp("one")
    assert main([str(hostile_run(folder / "runs").parent), "--out", str(folder / "page")]) == 0
    return folder / "page" / "report.html"


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a hostile run and others, of which only some can be compared."""
    folder = tmp_path_factory.mktemp("several")
    hostile_run(folder / "runs")
    for seed in range(3):
        make_run(folder / f"runs/none-{seed}", seed=seed, scores=(60.0, 70.0 + seed))
    make_run(folder / "runs/other", work={"--max_seq_length": 128})
    assert main([str(folder / "runs"), "--out", str(folder / "page")]) == 0
    return folder / "page" / "report.html"


@pytest.fixture(params=["one", "several"])
def page(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)  # type: ignore[no-any-return]


def test_console_is_clean_and_nothing_is_requested(browser: Any, page: Path) -> None:
    show(browser, page)
    charts = draw_all(browser)
    assert charts and all(chart["traces"] for chart in charts)
    buttons = browser.execute_script(
        "return [...document.querySelector('.modebar').querySelectorAll('button')].map(button => button.ariaLabel)"
    )
    assert buttons == ["Download plot as a PNG", "Zoom", "Pan", "Reset axes"], "one could upload the data"
    assert browser.get_log("browser") == []
    assert requests(browser) == []


def test_charts_have_the_runs_data(browser: Any, one: Path) -> None:
    show(browser, one)
    charts = {chart["title"]: chart["traces"] for chart in draw_all(browser)}
    loss, validation = charts["Loss"]
    assert loss["x"] == list(range(1, 41))
    assert loss["y"] == pytest.approx(np.linspace(5, 1, 40), rel=1e-5)
    assert (validation["name"], validation["x"], validation["y"]) == ("validation", [40], [1.5])
    assert [(trace["x"], trace["y"]) for trace in charts["Scores"]] == [([20, 40], [30, 50])]
    phases = charts["Where the step time went"]
    assert sum(np.array(trace["y"]) for trace in phases) == pytest.approx([1600] * 39, rel=1e-4)


def test_texts_of_users_stay_texts(browser: Any, page: Path) -> None:
    show(browser, page)
    draw_all(browser)
    assert browser.title.startswith(("Run ", "Report on 5 runs"))
    assert browser.execute_script("return document.querySelectorAll('img:not([src^=\"data:\"]), main b').length") == 0
    text = browser.execute_script("return document.body.textContent")
    assert text.count("onerror=") > 1 and "\x1b" not in text and "\u241b[31m" in text
    legends = browser.execute_script("return document.querySelectorAll('.plot .legend')")
    assert "several" not in str(page) or "<img src=x" in legends[0].text


def test_dark_scheme(browser: Any, one: Path) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    colours = {}
    for scheme in ("light", "dark"):
        show(browser, one, scheme=scheme)
        draw_all(browser)
        colours[scheme] = browser.execute_script(
            "const tick = document.querySelector('.plot .xtick text');"
            "return [getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color,"
            " getComputedStyle(tick).fill]"
        )
    assert colours["light"] == ["rgb(255, 255, 255)", "rgb(26, 26, 26)", "rgb(26, 26, 26)"]
    assert colours["dark"] == ["rgb(20, 23, 28)", "rgb(230, 230, 230)", "rgb(230, 230, 230)"]
    # Without loading the page again.
    features = [{"name": "prefers-color-scheme", "value": "light"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    tick = "return getComputedStyle(document.querySelector('.plot .xtick text')).fill"
    WebDriverWait(browser, 60).until(lambda _: browser.execute_script(tick) == "rgb(26, 26, 26)")


def test_a_phone_needs_no_scrolling_sideways(browser: Any, page: Path) -> None:
    show(browser, page, width=360)
    draw_all(browser)
    browser.execute_script("document.querySelectorAll('details').forEach(details => details.open = true)")
    root = "document.documentElement"
    assert browser.execute_script(f"return [{root}.scrollWidth, {root}.clientWidth]") == [360, 360]


def test_keyboard(browser: Any, one: Path) -> None:
    """Tab goes to the skip link, the sections, and then through the content; Enter opens the details."""
    from selenium.webdriver.common.keys import Keys

    def press(key: str) -> Any:
        webdriver.ActionChains(browser).send_keys(key).perform()
        return browser.switch_to.active_element

    show(browser, one)
    skip = press(Keys.TAB)
    assert skip.text == "Skip to the content" and skip.rect["x"] >= 0
    assert press(Keys.TAB).text == "Training"
    browser.execute_script("document.querySelector('.skip').focus()")
    assert press(Keys.ENTER).get_attribute("id") == "content"
    summary = next(reached for reached in (press(Keys.TAB) for _ in range(100)) if reached.tag_name == "summary")
    details = summary.find_element("xpath", "..")
    assert details.get_attribute("open") is None
    press(Keys.ENTER)
    assert details.get_attribute("open") is not None
    focusable = browser.execute_script("return document.querySelectorAll('.scroll:not([tabindex=\"0\"])').length")
    assert focusable == 0, "tables that are wider than the page could not be scrolled"


def test_50_runs_of_10_000_points_open_quickly(browser: Any, tmp_path: Path) -> None:
    """Processor time of the page's thread until its first chart is drawn, which other work does not change."""
    one = record.read(make_run(tmp_path / "run", steps=10_000))
    noise = np.random.default_rng(0).normal(size=10_000)
    noisy = replace(one, steps=LineArrays({**one.steps.columns, "loss": 3 + noise, "grad_norm": abs(noise)}))
    page = tmp_path / "report.html"
    page.write_text(runs_page.page_of([replace(noisy, name=f"runs/{n}") for n in range(50)], [], [], [], []).as_html())
    assert page.stat().st_size < 10e6
    browser.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
    show(browser, page)
    (loss, *_) = draw_all(browser, 1)
    metrics = browser.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
    seconds = {metric["name"]: metric["value"] for metric in metrics}
    assert len(loss["traces"]) == 50
    assert max(loss["traces"][7]["y"]) == pytest.approx(3 + noise.max(), rel=1e-5)
    assert 0.1 < seconds["TaskDuration"] < OPENS_S
