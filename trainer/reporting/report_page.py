"""The fixed text of the report's page. `%%NAME%%` is where `report.render` puts a part."""

from typing import Final

CHART_SCRIPT: Final = """
const figures = FIGURES;
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const style = () => {
  const css = getComputedStyle(document.documentElement);
  const read = (name) => css.getPropertyValue(name).trim();
  return {text: read("--text"), grid: read("--grid"), card: read("--card")};
};
const withStyle = (layout, colors) => {
  const full = {
    ...layout,
    margin: {l: 52, r: 16, t: 8, b: layout.xaxis ? 56 : 30},
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: {color: colors.text, family: "system-ui, sans-serif", size: 12},
    legend: {orientation: "h", y: 1.02, yanchor: "bottom", x: 0, xanchor: "left"},
    hoverlabel: {bgcolor: colors.card, font: {color: colors.text}},
  };
  for (const name of ["xaxis", "xaxis2", "yaxis", "yaxis2"]) {
    if (name.endsWith("2") && !layout[name]) continue;
    full[name] = {...layout[name], gridcolor: colors.grid, zerolinecolor: colors.grid, automargin: true};
  }
  return full;
};
const draw = () => figures.forEach((figure, number) => {
  const colors = style();
  const data = figure.data.map((trace) =>
    trace.error_y ? {...trace, error_y: {...trace.error_y, color: colors.text}} : trace);
  Plotly.react(`chart-${number}`, data, withStyle(figure.layout, colors),
    {responsive: true, displaylogo: false, displayModeBar: false});
});
draw();
dark.addEventListener("change", draw);
"""

STYLE: Final = """
:root { --back: #f6f7f9; --card: #ffffff; --text: #1d2330; --soft: #5b6472; --grid: #dfe3e9;
  --accent: #3d7fd9; color-scheme: light dark; }
@media (prefers-color-scheme: dark) {
  :root { --back: #14171d; --card: #1d222b; --text: #e4e8ef; --soft: #9aa4b2; --grid: #333b47; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 26px; margin: 0 0 4px; } h2 { font-size: 19px; margin: 36px 0 12px; }
h3 { font-size: 15px; margin: 0 0 6px; }
p { margin: 4px 0; } .lead { color: var(--soft); }
code, pre { font: 13px/1.45 ui-monospace, Menlo, Consolas, monospace; }
code { background: var(--card); border: 1px solid var(--grid); border-radius: 4px; padding: 1px 5px; }
.charts { display: grid; grid-template-columns: repeat(6, minmax(0, 1fr)); gap: 14px; margin-top: 16px; }
.chart, .example, .scroll { background: var(--card); border: 1px solid var(--grid); border-radius: 8px; }
.chart { grid-column: span 2; margin: 0; padding: 14px 14px 10px; min-width: 0; }
.chart.wide { grid-column: span 4; }
.chart > div { height: 230px; } .main .chart > div { height: 320px; }
figcaption { color: var(--soft); font-size: 13px; }
.scroll { overflow-x: auto; margin-top: 10px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 13px; }
th, td { text-align: left; padding: 6px 12px; border-bottom: 1px solid var(--grid); white-space: nowrap; }
th { color: var(--soft); font-weight: 600; } tbody tr:last-child td { border-bottom: 0; }
.headline table { font-size: 15px; }
.config td, .events td:last-child { white-space: normal; overflow-wrap: anywhere; }
.examples { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 14px; }
.example { padding: 14px; min-width: 0; }
.example pre { margin: 0; max-height: 460px; overflow: auto; white-space: pre-wrap; overflow-wrap: anywhere; }
.reward { color: var(--soft); font-weight: 400; }
details { margin-top: 10px; } summary { cursor: pointer; color: var(--accent); }
@media (max-width: 820px) {
  .chart, .chart.wide { grid-column: span 6; }
  .examples { grid-template-columns: 1fr; } }
"""

PAGE: Final = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; base-uri 'none'; form-action 'none';
 style-src 'unsafe-inline'; img-src data: blob:; script-src %%POLICY%%">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>%%TITLE%%</title>
<style>{STYLE}</style>
</head>
<body>
<main>
<h1>%%TITLE%%</h1>
<div class="lead">%%NOTES%%%%STORE%%</div>
<div class="headline">%%HEADLINE%%</div>
<div class="charts main">%%MAIN_CHARTS%%</div>
<h2>Health of the run</h2>
<div class="charts">%%SMALL_CHARTS%%</div>
<details><summary>All metrics of every update</summary>%%UPDATES%%</details>
<h2>Monitors</h2>
<div class="events">%%EVENTS%%</div>
<h2>Rollouts</h2>
<div class="examples">%%EXAMPLES%%</div>
<h2>Configuration</h2>
<div class="config">%%CONFIG%%</div>
</main>
%%PLOTLY_SCRIPT%%
%%CHART_SCRIPT%%
</body>
</html>
"""
