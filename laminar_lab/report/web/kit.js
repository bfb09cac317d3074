// The page kit: draws the parts of `kit.py`. Whatever text comes from a run is set as text, never as markup.
"use strict";

const byId = (id) => document.getElementById(id), data = JSON.parse(byId("data").textContent);
const number = (value, digits = 3) =>
  value === null || value === undefined ? "–" : Number(value).toLocaleString("en", { maximumSignificantDigits: digits });
const seconds = (s) =>
  s === null || s === undefined ? "–" : s >= 1 ? `${number(s)} s` : s >= 1e-3 ? `${number(s * 1e3)} ms` : `${number(s * 1e6)} µs`;
const plain = (text) => String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;"); // plotly reads a subset of HTML
const UNSEEN = /[\p{C}\p{Zl}\p{Zp}\p{Zs}]/gu; // as `records.visible`
const scheme = matchMedia("(prefers-color-scheme: dark)"), palette = new Map();
function css(name) {
  if (!palette.has(name)) palette.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
  return palette.get(name);
}
scheme.addEventListener("change", () => palette.clear()); // before a page draws: listeners run in this order

// An escape as Python writes it.
function escapeOf(character) {
  const named = { "\r": "\\r", "\n": "\\n", "\t": "\\t" }[character], code = character.codePointAt(0), hex = code.toString(16);
  return named || (code < 0x100 ? `\\x${hex.padStart(2, "0")}` : code < 0x10000 ? `\\u${hex.padStart(4, "0")}` : `\\U${hex.padStart(8, "0")}`);
}
// A text on one line, for a cell or a title.
const oneLine = (text) => String(text).replace(UNSEEN, (one) => (one === " " ? one : escapeOf(one)));

function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function fillSelect(select, options) {
  const chosen = select.value;
  select.replaceChildren(...options.map(([value, text]) => Object.assign(element("option", text), { value })));
  if (options.some(([value]) => value === chosen)) select.value = chosen;
}

function drawCards(cards) {
  byId("headline").replaceChildren(...cards.map((one) => {
    const card = element("div", undefined, "figure");
    card.append(element("span", one.name), element("b", one.value), element("span", one.note));
    return card;
  }));
}

function axis(title, more = {}) {
  return {
    title: { text: plain(title), font: { size: 12, color: css("muted") }, standoff: 8 }, gridcolor: css("line"), zeroline: false,
    linecolor: css("line"), tickfont: { size: 11, color: css("muted") }, automargin: true, ...more,
  };
}

function plot(id, traces, layout) {
  const box = typeof id === "string" ? byId(id) : id;
  if (!traces.length) {
    Plotly.purge(box);
    box.replaceChildren(element("p", "Nothing yet.", "empty"));
    return;
  }
  box.querySelector(".empty")?.remove();
  const font = { family: getComputedStyle(document.body).fontFamily, size: 12, color: css("ink") };
  Plotly.react(box, traces, {
    font, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", margin: { l: 56, r: 16, t: 16, b: 44 },
    showlegend: false, uirevision: "kept", hoverlabel: { font: { family: font.family, size: 12 } }, bargap: 0, ...layout,
  }, { displayModeBar: false, responsive: true });
}

function logTicks(low, high) {
  const tickvals = [], digits = high / low > 1e3 ? [1] : [1, 2, 5];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
    tickvals.push(...digits.map((digit) => digit * 10 ** power).filter((x) => x >= low && x <= high));
  return { type: "log", tickvals, ticktext: tickvals.map(seconds) };
}

// Ticks of an axis of few whole numbers, as steps: 1, 2, 3 and no 1.5.
function wholeTicks(values) {
  const known = values.filter((value) => value !== null);
  return known.length && known.every(Number.isInteger) && Math.max(...known) - Math.min(...known) <= 12 ? { dtick: 1, tick0: 0 } : {};
}

function trace(one) {
  const colour = css(one.colour || "accent"), name = plain(one.name), kind = one.kind || "line";
  const hover = one.words ? { text: one.words.map(plain), hovertemplate: "%{text}<extra></extra>", textposition: kind === "row" ? "outside" : "none" } : { hovertemplate: `${name} %{y:.4~g}<br>%{x:,.4~r}<extra></extra>` };
  const shared = { name, x: one.x, y: one.y, ...hover };
  if (kind === "row") return { ...shared, type: "bar", orientation: "h", base: one.base, width: 0.62, marker: { color: colour }, textposition: "none" };
  if (kind === "bar") return { ...shared, type: "bar", width: one.width, marker: { color: colour } };
  if (kind === "dots") return { ...shared, type: "scatter", mode: "markers", marker: { color: colour, size: 4, opacity: 0.6 }, showlegend: false };
  if (kind === "band") return { ...shared, type: "scatter", mode: "lines", fill: "toself", line: { width: 0 }, fillcolor: colour, opacity: 0.18, hoverinfo: "skip", hovertemplate: null, showlegend: false };
  const error = one.low && {
    type: "data", symmetric: false, array: one.high.map((high, i) => high - one.y[i]), arrayminus: one.low.map((low, i) => one.y[i] - low), color: colour, thickness: 0.8, width: 2,
  };
  return {
    ...shared, type: "scatter", mode: kind === "points" ? "markers" : one.x.length < 30 ? "lines+markers" : "lines", connectgaps: true, line: { color: colour, width: 1.6 },
    marker: { color: colour, size: 6 }, ...(error ? { error_y: error } : {}),
  };
}

function drawChart(box, chart) {
  const { heat, series = [], marks = [] } = chart, rows = series.some((one) => one.kind === "row"), legend = series.length > 1;
  const scale = heat && { colorscale: [[0, css("track")], [0.02, "#3b4cc0"], [0.35, "#2a9d8f"], [0.7, "#b5d33d"], [1, "#fde725"]] };
  const grid = heat && {
    type: "heatmap", x: heat.x, y: heat.y, z: heat.z, ...scale, xgap: heat.x.length < 300 ? 0.5 : 0, ygap: 1, hovertemplate: `%{x:,.4~r}, %{y}<br>${plain(heat.name)} %{z:,.3~r}<extra></extra>`,
    colorbar: { title: { text: plain(heat.name), side: "right", font: { size: 11 } }, thickness: 10, outlinewidth: 0, tickfont: { size: 11 } },
  };
  if (heat) box.style.height = `${Math.max(280, Math.min(640, 120 + 26 * heat.y.length))}px`;
  const ends = series.length && chart.log ? [series[0].x[0], series[0].x.at(-1)] : null, place = (x) => (chart.log ? Math.log10(Math.max(x, ends[0])) : x);
  const across = [...(heat ? heat.x : []), ...series.flatMap((one) => (rows ? one.base : one.x))], middle = marks.length && (place(Math.min(...across)) + place(Math.max(...across))) / 2;
  plot(box, chart.is_empty ? [] : [...(heat ? [grid] : []), ...series.map(trace)], {
    xaxis: axis(chart.x, chart.log && ends ? logTicks(...ends) : wholeTicks(across)),
    yaxis: axis(chart.y, { ...wholeTicks(heat ? heat.y : []), ...(rows || heat ? { autorange: rows ? "reversed" : true, showgrid: false } : {}), ...(chart.from_zero ? { rangemode: "tozero" } : {}) }),
    showlegend: legend, legend: { orientation: "h", yref: "container", y: 1, yanchor: "top", x: 0 }, margin: { l: 56, r: 16, t: (marks.length ? 10 + 14 * Math.min(3, marks.length) : 16) + (legend ? 28 : 0), b: 44 },
    shapes: marks.map(([, x]) => ({ type: "line", x0: x, x1: x, y0: 0, y1: 1, yref: "paper", line: { color: css("second"), width: 1.5, dash: "dot" } })),
    annotations: marks.map(([name, x], i) => ({
      x: place(x), y: 1, yref: "paper", yanchor: "bottom", yshift: 14 * ((marks.length - 1 - i) % 3), showarrow: false, xanchor: place(x) < middle ? "left" : "right",
      text: plain(name), font: { size: 11, color: css("second") },
    })),
  });
}

function table({ head, rows }) {
  const made = element("table"), kind = (i) => (i === 0 ? "" : "number");
  const line = (cells, tag) => {
    const row = element("tr");
    row.append(...cells.map((text, i) => element(tag, oneLine(text), kind(i))));
    return row;
  };
  made.createTHead().append(line(head, "th"));
  made.createTBody().append(...rows.map((cells) => line(cells, "td")));
  return made;
}

function tableBox(found) {
  const frame = element("div", undefined, "scroll");
  frame.append(table(found));
  return frame;
}

// Draw a panel into `parent`, or again into the one that is there, so that a choice and a zoom stay.
function drawPanel(panel, parent) {
  const charts = panel.charts || [], tables = panel.tables || [];
  let box = byId(panel.id);
  if (!box) {
    box = element("section", undefined, `panel${panel.is_wide ? " wide" : ""}`);
    box.id = panel.id;
    const title = element("div", undefined, "title"), label = element("label", `${panel.choose} `, "tools");
    title.append(element("h2", panel.title), label);
    label.append(element("select"));
    box.append(title, element("div", undefined, "above"), element("div", undefined, "charts"), element("div", undefined, "below"));
    parent.append(box);
  }
  const above = box.querySelector(".above"), frame = box.querySelector(".charts"), below = box.querySelector(".below"), select = box.querySelector("select");
  const list = element("ul");
  list.append(...(panel.lines || []).map((line) => element("li", line)));
  above.replaceChildren(...(panel.lead ? [element("p", panel.lead, "lead")] : []), ...(panel.note ? [element("p", panel.note, "note")] : []), ...(panel.lines ? [list] : []));
  fillSelect(select, panel.choose ? charts.map((one) => [one.name, one.name]) : []);
  select.parentElement.hidden = select.options.length < 2;
  const show = () => {
    const drawn = charts.filter((one) => !panel.choose || one.name === select.value);
    while (frame.children.length > drawn.length) frame.lastChild.remove();
    while (frame.children.length < drawn.length) frame.appendChild(element("div")).append(element("h3"), element("div", undefined, "chart"));
    drawn.forEach((chart, i) => { // into cells that have their sizes
      frame.children[i].firstChild.textContent = panel.choose ? "" : chart.name || "";
      drawChart(frame.children[i].lastChild, chart);
    });
    below.replaceChildren(...tables.map(tableBox));
    if (!charts.length && !tables.length && !panel.lines) below.append(element("p", "Nothing yet.", "empty"));
    if (!panel.text) return;
    const details = element("details");
    details.append(element("summary", "show"), element("pre", panel.text));
    below.replaceChildren(details);
  };
  select.onchange = show;
  show();
}
