"use strict";
// Draws each <figure class="chart"> from the JSON in it, once it comes near the visible part of the page.
(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const narrow = matchMedia("(max-width: 40rem)");
  // Palette of Okabe and Ito (2008), distinguishable with any color vision, and legible on both backgrounds.
  const COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8c8c8c"];
  const DASHES = ["solid", "dash", "dot", "dashdot"];
  const MANY = 8; // curves: their legend is a column of its own

  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const asText = (name) => name.replace(/&/g, "&amp;").replace(/</g, "&lt;"); // plotly reads markup in names

  function trace(curve, chart) {
    const colour = COLOURS[curve.colour % COLOURS.length];
    const dash = DASHES[Math.floor(curve.colour / COLOURS.length) % DASHES.length];
    return {
      type: "scatter",
      mode: chart.stacked ? "none" : curve.points || curve.x.length < 3 ? "lines+markers" : "lines",
      name: asText(curve.name),
      x: curve.x,
      y: curve.y,
      line: { color: colour, dash, width: chart.curves.length > MANY ? 1 : 1.6 },
      marker: { color: colour, size: 7 },
      ...(chart.stacked ? { stackgroup: "all", fillcolor: colour } : {}),
      hovertemplate: "%{y:.5~g}",
    };
  }

  function layout(chart) {
    const many = chart.curves.length > MANY;
    const axis = { gridcolor: style("--line"), zerolinecolor: style("--line"), automargin: true, exponentformat: "e" };
    return {
      height: many && !narrow.matches ? 460 : 320,
      margin: { t: 30, r: 10, b: 45, l: 60 },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "system-ui, sans-serif", size: 12, color: style("--text") },
      hoverlabel: { bgcolor: style("--surface"), font: { color: style("--text") } },
      hovermode: many ? "closest" : "x unified",
      showlegend: chart.curves.length > 1 && !(many && narrow.matches),
      // Below a narrow chart the legend's lines would cover the axis' title.
      legend: many
        ? { font: { size: 10 } }
        : { orientation: "h", x: 0, ...(narrow.matches ? { y: 1, yanchor: "bottom" } : { y: -0.25, yanchor: "top" }) },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: style("--muted"), activecolor: style("--link") },
      xaxis: { ...axis, title: { text: chart.x } },
      yaxis: { ...axis, title: { text: chart.y, standoff: 12 }, ...(chart.stacked ? { rangemode: "tozero" } : {}) },
    };
  }

  function draw(figure) {
    const chart = JSON.parse(figure.querySelector("script").textContent);
    const place = figure.querySelector(".plot");
    const config = {
      responsive: true,
      displaylogo: false,
      showSendToCloud: false, // a button that uploads the data
      displayModeBar: !narrow.matches,
      modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
    };
    figure.dataset.drawn = "yes";
    Plotly.react(place, chart.curves.map((curve) => trace(curve, chart)), layout(chart), config);
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
  const redraw = () => figures.filter((figure) => figure.dataset.drawn).forEach(draw);
  dark.addEventListener("change", redraw);
  narrow.addEventListener("change", redraw);
  addEventListener("beforeprint", () => figures.forEach(draw));
})();
