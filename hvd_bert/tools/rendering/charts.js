"use strict";
// Draws each <figure class="chart"> from the JSON in it, once it comes near the visible part of the page.
(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const narrow = matchMedia("(max-width: 40rem)");
  const slider = document.querySelector("#smoothing");
  const COLOURS = 7; // --curve-0 to --curve-6 in page.css
  const DASHES = ["", "6px,3px", "2px,3px", "9px,3px,2px,3px"];
  const MANY = 8; // with more curves than this, lines are thinner and the chart is higher
  const SHORT = 20; // curves of at most this many points are not smoothed

  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const asText = (name) => name.replace(/&/g, "&amp;").replace(/</g, "&lt;"); // plotly reads markup in names
  const colourOf = (curve) => style(`--curve-${curve.colour % COLOURS}`);
  const dashOf = (curve) => DASHES[Math.floor(curve.colour / COLOURS) % DASHES.length];

  // Smooths values by an exponentially weighted mean over both directions, which does not lag behind the values. A
  // value at a distance of 1 % of the curve has the weight `weight`.
  function smoothed(values, weight) {
    const decay = weight ** (100 / values.length);
    const trailing = (list) => {
      let [sum, count] = [0, 0];
      return list.map((value) => [(sum = value + decay * sum), (count = 1 + decay * count)]);
    };
    const after = trailing([...values].reverse()).reverse();
    return trailing(values).map(([sum, count], at) => (sum + after[at][0] - values[at]) / (count + after[at][1] - 1));
  }

  // Makes two invisible lines, the edges of a curve's band, with the area between them filled.
  function band(curve, colour, hidden) {
    const edge = { type: "scatter", mode: "lines", x: curve.x, visible: !hidden, line: { width: 0 }, hoverinfo: "skip" };
    const filled = { fill: "tonexty", fillcolor: `${colour}22` };
    const [low, high] = curve.band;
    return [{ ...edge, y: low }, { ...edge, y: high, ...filled }];
  }

  function traces(curve, chart, hidden) {
    const colour = colourOf(curve);
    const means = chart.noisy && !curve.points && curve.x.length > SHORT && +slider?.value;
    const shown = {
      type: "scatter",
      mode: chart.stacked ? "none" : curve.points || curve.x.length < 3 ? "lines+markers" : "lines",
      name: asText(curve.name),
      visible: !hidden,
      x: curve.x,
      y: curve.y,
      line: { color: colour, dash: dashOf(curve) || "solid", width: chart.curves.length > MANY ? 1 : 2 },
      marker: { color: colour, size: 7 },
      ...(chart.stacked ? { stackgroup: "all", fillcolor: colour } : {}),
      hovertemplate: "%{y:.4~g}",
    };
    const under = curve.band.length ? band(curve, colour, hidden) : [];
    if (!means) return [...under, shown];
    const mean = { ...shown, y: smoothed(curve.y, means), hoverinfo: "skip", hovertemplate: null };
    const template = "%{y:.4~g}, smoothed %{customdata:.4~g}";
    return [...under, { ...shown, customdata: mean.y, opacity: 0.3, hovertemplate: template }, mean];
  }

  function layout(chart) {
    const many = chart.curves.length > MANY;
    const axis = { gridcolor: style("--line"), zeroline: false, automargin: true, exponentformat: "e", nticks: 6 };
    const muted = { size: 12, color: style("--muted") };
    return {
      height: many && !narrow.matches ? 460 : 260,
      margin: { t: 10, r: 8, b: 40, l: 36 },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { ...muted, family: "system-ui, sans-serif" },
      hoverlabel: { bgcolor: style("--surface"), bordercolor: style("--line"), font: { color: style("--text") } },
      hovermode: many ? "closest" : "x unified",
      dragmode: narrow.matches ? false : "zoom", // so that a finger scrolls the page
      showlegend: false,
      modebar: { bgcolor: "rgba(0,0,0,0)", color: style("--muted"), activecolor: style("--link") },
      xaxis: { ...axis, title: { text: chart.x, font: muted, standoff: 6 }, unifiedhovertitle: { text: `${chart.x} %{x}` } },
      yaxis: { ...axis, rangemode: chart.stacked ? "tozero" : "normal" },
    };
  }

  // Fills the legend: a button per curve, with its name and last value. A click hides or shows the curve.
  function legend(figure, chart) {
    const short = (value) => (value && Math.abs(value) < 1e-3 ? value.toExponential(2) : Number(value.toPrecision(4)));
    const keys = chart.curves.map((curve, place) => {
      const key = document.createElement("button");
      const line = `stroke="${colourOf(curve)}" stroke-width="3" stroke-dasharray="${dashOf(curve)}"`;
      key.innerHTML = `<svg width="18" height="8" aria-hidden="true"><path d="M0 4h18" ${line}/></svg>`;
      const value = document.createElement("strong");
      value.textContent = curve.y.length && !chart.stacked ? short(curve.y.at(-1)) : "";
      key.append(chart.curves.length > 1 ? curve.name : "last", value);
      key.title = `${chart.stacked ? "" : "The last value. "}Click to hide or show the curve.`;
      key.setAttribute("aria-pressed", !figure.hiddenCurves.has(curve));
      key.onclick = () => {
        figure.hiddenCurves.delete(curve) || figure.hiddenCurves.add(curve);
        draw(figure);
        figure.querySelector(".keys").children[place].focus();
      };
      return key;
    });
    figure.querySelector(".keys").replaceChildren(...keys);
  }

  function draw(figure) {
    figure.chart ??= JSON.parse(figure.querySelector("script").textContent);
    figure.hiddenCurves ??= new Set();
    const { chart } = figure;
    const config = {
      responsive: true,
      displaylogo: false,
      showSendToCloud: false, // a button that uploads the data
      displayModeBar: !narrow.matches,
      modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
    };
    legend(figure, chart);
    const drawn = chart.curves.flatMap((curve) => traces(curve, chart, figure.hiddenCurves.has(curve)));
    Plotly.react(figure.querySelector(".plot"), drawn, layout(chart), config);
  }

  const figures = [...document.querySelectorAll("figure.chart")];
  const watcher = new IntersectionObserver(
    (entries) => {
      for (const { isIntersecting, target } of entries) {
        if (!isIntersecting) continue;
        watcher.unobserve(target);
        draw(target);
      }
    },
    { rootMargin: "400px" },
  );
  for (const figure of figures) watcher.observe(figure);
  const redraw = () => figures.filter((figure) => figure.chart).forEach(draw);
  for (const changed of [dark, narrow, slider]) changed?.addEventListener("change", redraw);
  slider?.addEventListener("input", redraw);
  addEventListener("beforeprint", () => figures.forEach(draw));
})();
