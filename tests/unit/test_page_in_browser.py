"""The report's pages in headless Chromium. All tests of this file share a browser."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_runs import make_run, make_samples

from hvd_bert.tools.report.__main__ import main

webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium (env/setup.sh --dev)")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
missing = CHROMIUM is None or DRIVER is None
reason = "needs Debian's packages chromium and chromium-driver"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(missing, reason=reason)]
HOSTILE = "a</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">\x1b[31m"


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


def drawn(browser: Any, page: Path, width: int) -> dict[str, list[dict[str, Any]]]:
    """Open a page `width` pixels wide and scroll to each chart until it is drawn.

    Returns plotly's traces by chart title, without the smoothed curves.
    """
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    for log in ("browser", "performance"):
        browser.get_log(log)  # clears the previous page's log
    browser.get(page.as_uri())
    return browser.execute_async_script(  # type: ignore[no-any-return]
        """
        const [done] = arguments;
        (async () => {
          const found = {};
          for (const figure of document.querySelectorAll("figure.chart")) {
            figure.scrollIntoView();
            const plot = figure.querySelector(".plot");
            while (!plot.data || !plot.querySelector(".main-svg")) await new Promise(requestAnimationFrame);
            const logged = plot.data.filter(({ hoverinfo }) => hoverinfo !== "skip");  // not the smoothed curves
            const traces = logged.map(({ name, x, y }) => ({ name, x: [...x], y: [...y] }));
            found[figure.querySelector("figcaption").textContent] = traces;
          }
          done(found);
        })();
        """
    )


def requests(browser: Any) -> list[str]:
    """Return the addresses that the page requested, except the page itself and data: URLs."""
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


@pytest.mark.parametrize("several", [False, True])
def test_page_with_hostile_texts(browser: Any, tmp_path: Path, several: bool) -> None:
    """Texts that look like markup are shown as text, in the page of one run or of several."""
    hostile_run(tmp_path / "runs")
    for seed in range(3 if several else 0):
        make_run(tmp_path / f"runs/none-{seed}", seed=seed, scores=(60.0, 70.0 + seed))
    assert main([str(tmp_path / "runs"), "--out", str(tmp_path / "page")]) == 0
    page = tmp_path / "page" / "report.html"
    charts, run = drawn(browser, page, 1100), browser.execute_script
    assert charts and all(charts.values())
    assert browser.get_log("browser") == [] and requests(browser) == []
    buttons = run(
        "return [...document.querySelectorAll('.modebar')[0].querySelectorAll('button')].map(b => b.ariaLabel)"
    )
    assert buttons == ["Download plot as a PNG", "Zoom", "Pan", "Reset axes"], "no button uploads the data"
    # No text has become markup.
    assert browser.title.startswith("Report on 4 runs" if several else "Run ")
    assert run("return document.querySelectorAll('img:not([src^=\"data:\"]), main b').length") == 0
    text = run("return document.body.textContent")
    assert text.count("onerror=") > 1 and "\x1b" not in text and r"\x1b[31m" in text
    assert drawn(browser, page, 360).keys() == charts.keys(), "on a phone"
    run("document.querySelectorAll('details').forEach(details => details.open = true)")
    widths = run("return ['scrollWidth', 'clientWidth'].map(name => document.documentElement[name])")
    assert widths == [360, 360], "wider than the screen"
    if several:
        filled = "document.querySelector('.plot').data.filter(({ fill }) => fill === 'tonexty')"
        assert run(f"return {filled}.map(({{ name, x }}) => x.length)") == [40], "the band of the three repeats"
        return
    loss, validation = charts["Loss"]
    assert (loss["x"], loss["y"]) == (list(range(1, 41)), pytest.approx(np.linspace(5, 1, 40), rel=1e-5))
    assert (validation["name"], validation["x"], validation["y"]) == ("validation", [40], [1.5])
    assert [(trace["x"], trace["y"]) for trace in charts["Scores"]] == [([20, 40], [30, 50])]
    phases = charts["Step time by phase"]
    assert sum(np.array(trace["y"]) for trace in phases) == pytest.approx([1.6] * 39, rel=1e-4)
    smoothed = "return document.querySelector('.plot').data.filter(({ hoverinfo }) => hoverinfo === 'skip')"
    assert run(f"{smoothed}[0].y") == pytest.approx(np.linspace(5, 1, 40), abs=0.1)
    run(
        "const slider = document.querySelector('#smoothing'); slider.value = 0;"
        " slider.dispatchEvent(new Event('input')); document.querySelector('.keys button').click()"
    )
    shown = run("return document.querySelector('.plot').data.map(({ visible }) => visible)")
    assert shown == [False, True], "one curve is hidden, none is smoothed"
    assert run(f"{smoothed}.length") == 0
