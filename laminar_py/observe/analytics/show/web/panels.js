// The panels beside the timeline. Each function draws one from the fields of `observe/analytics/panels.py`; whatever text
// comes from the run is set as text, never as markup.
"use strict";

const number = (value, digits = 3) =>
  value === null || value === undefined ? "–" : Number(value).toLocaleString("en", { maximumSignificantDigits: digits });
const seconds = (s) =>
  s === null || s === undefined ? "–" : s >= 1 ? `${number(s)} s` : s >= 1e-3 ? `${number(s * 1e3)} ms` : `${number(s * 1e6)} µs`;
const scheme = matchMedia("(prefers-color-scheme: dark)"), palette = new Map();
function css(name) {
  if (!palette.has(name)) palette.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
  return palette.get(name);
}
scheme.addEventListener("change", () => palette.clear()); // before anybody draws: listeners run in this order
const byId = (id) => document.getElementById(id);

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

// Plotly reads a subset of HTML in names and ticks
const plain = (text) => String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;");

function axis(title, more = {}) {
  return {
    title: { text: title, font: { size: 12, color: css("muted") }, standoff: 8 }, gridcolor: css("line"), zeroline: false,
    linecolor: css("line"), tickfont: { size: 11, color: css("muted") }, automargin: true, ...more,
  };
}

function plot(id, traces, layout) {
  const box = byId(id);
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

// A table in a panel, of pages that are made of such; the last `words` columns are text
function sheet(found) {
  const panel = element("section", undefined, "panel"), table = element("table"), frame = element("div", undefined, "scroll");
  const kind = (i) => (i === 0 ? "" : i >= found.head.length - found.words ? "words" : "number");
  const row = (cells, tag) => {
    const made = element("tr");
    made.append(...cells.map((text, i) => element(tag, text, kind(i))));
    return made;
  };
  const head = element("thead"), body = element("tbody");
  head.append(row(found.head, "th"));
  body.append(...found.rows.map((cells) => row(cells, "td")));
  table.append(head, body);
  frame.append(table);
  panel.append(element("h2", found.title));
  if (found.note) panel.append(element("p", found.note, "note"));
  if (found.rows.length) panel.append(frame);
  return panel;
}

function drawHeadline(page) {
  byId("headline").replaceChildren(...page.headline.map((figure) => {
    const card = element("div", undefined, "figure");
    card.append(element("span", figure.name), element("b", figure.value), element("span", figure.note));
    return card;
  }));
}

function drawWall(page) {
  byId("wall").hidden = !page.wall;
  if (!page.wall) return;
  byId("wall-name").textContent = page.wall.name;
  byId("wall-meaning").textContent = page.wall.meaning;
  byId("wall-evidence").replaceChildren(...page.wall.evidence.map((line) => element("li", line)));
  byId("wall-remedies").replaceChildren(...page.wall.remedies.map((remedy) =>
    element("li", `${remedy.key}: ${remedy.change}: ${remedy.why}`)));
}

function logTicks(low, high) {
  const tickvals = [], digits = high / low > 1e3 ? [1] : [1, 2, 5];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
    tickvals.push(...digits.map((digit) => digit * 10 ** power).filter((x) => x >= low && x <= high));
  return { tickvals, ticktext: tickvals.map(seconds) };
}

function drawDistribution(id, found) {
  if (!found || !found.total) return plot(id, []);
  const { edges, counts, percentiles } = found;
  const marks = Object.entries(percentiles), at = (x) => (found.log ? Math.log10(Math.max(x, edges[0])) : x);
  const mids = counts.map((_, i) => (found.log ? Math.sqrt(edges[i] * edges[i + 1]) : (edges[i] + edges[i + 1]) / 2));
  const show = found.unit === "s" ? seconds : (x) => `${number(x)} ${found.unit}`;
  plot(id, [{
    type: "bar", x: mids, y: counts, width: counts.map((_, i) => edges[i + 1] - edges[i]), marker: { color: css("accent") },
    customdata: counts.map((_, i) => `${show(edges[i])} to ${show(edges[i + 1])}`),
    hovertemplate: "%{customdata}<br>%{y:,} trajectories<extra></extra>",
  }], {
    xaxis: axis(found.log ? `${found.name} (log scale)` : `${found.name} (${found.unit})`, found.log ? { type: "log", ...logTicks(edges[0], edges.at(-1)) } : {}),
    yaxis: axis("trajectories"), margin: { l: 56, r: 16, t: 52, b: 44 },
    shapes: marks.map(([, x]) => ({
      type: "line", x0: x, x1: x, y0: 0, y1: 1, yref: "paper", line: { color: css("second"), width: 1.5, dash: "dot" },
    })),
    annotations: marks.map(([name, x], i) => ({
      x: at(x), y: 1, yref: "paper", yanchor: "bottom", yshift: 14 * (marks.length - 1 - i), showarrow: false,
      xanchor: i === 0 ? "right" : "left", text: `${name} ${show(x)}`, font: { size: 11, color: css("second") },
    })),
  });
}

function drawDistributions(page) {
  const latencies = page.distributions.filter((one) => one.unit === "s"), counted = page.distributions.filter((one) => one.unit !== "s");
  const measure = byId("length-measure");
  fillSelect(measure, counted.map((one) => [one.name, one.name]));
  measure.parentElement.hidden = counted.length < 2; // turns, where environments answer
  measure.onchange = () => drawDistribution("lengths", counted.find((one) => one.name === measure.value));
  measure.onchange();
  const select = byId("latency-stage");
  fillSelect(select, latencies.map((one) => [one.name, one.name]));
  select.onchange = () => drawDistribution("latencies", latencies.find((one) => one.name === select.value));
  select.onchange();
}

function drawStaleness(page) {
  const map = page.staleness, wide = map.per_column > 1 ? `step (a column is ${map.per_column})` : "step";
  const scale = ["panel", "accent"].map((name, i) => [i, css(name)]);
  plot("staleness", map.steps.length ? [{
    type: "heatmap", x: map.steps, y: map.staleness, z: map.counts, colorscale: scale, zmin: 0, xgap: 0.5, ygap: 1,
    colorbar: { title: { text: "trajectories", side: "right", font: { size: 11 } }, thickness: 10, outlinewidth: 0, tickfont: { size: 11 } },
    hovertemplate: "step %{x}<br>%{y} learner steps old<br>%{z:,} trajectories<extra></extra>",
  }] : [], { xaxis: axis(wide, { showgrid: false }), yaxis: axis("staleness (learner steps)", { showgrid: false, dtick: map.staleness.length > 12 ? undefined : 1 }) });
}

function drawStep(page) {
  const orange = page.stages.some((one) => one.binding) ? ` Orange: ${page.wall ? "what limits the run" : "the longest"}.` : "";
  byId("step-note").textContent = page.stages.length ? `Stages that begin together run at the same time.${orange}` : "";
  const stages = page.stages, end = Math.max(page.step_s, ...stages.map((one) => one.start_s + one.seconds));
  plot("step", stages.length ? [{
    type: "bar", orientation: "h", y: stages.map((one) => plain(one.name)), x: stages.map((one) => one.seconds),
    base: stages.map((one) => one.start_s), width: 0.62, cliponaxis: false,
    marker: { color: stages.map((one) => css(one.binding ? "second" : "accent")) },
    text: stages.map((one) => seconds(one.seconds)), textposition: "outside", textfont: { color: css("muted"), size: 11 },
    customdata: stages.map((one) => plain(one.note)),
    hovertemplate: "%{y}: %{text}<br>%{customdata}<extra></extra>",
  }] : [], {
    xaxis: axis(`time in the step (s); measured: ${seconds(page.step_s)}`, { range: [0, end * 1.16] }),
    yaxis: axis("", { autorange: "reversed", showgrid: false }),
  });
}

function drawCurves(page) {
  const curves = page.curves, line = (name, y, colour, more) => ({
    type: "scatter", mode: "lines", name, x: curves.rl_s, y, line: { color: css(colour), width: 1.6 },
    hovertemplate: `${name} %{y:.3f}<br>%{x:,.1f} s<extra></extra>`, ...more,
  });
  const trained = curves.rl_s.length > 0, dashes = ["solid", "dash", "dot", "dashdot"];
  plot("curves", curves.rl_s.length || curves.evaluations.length ? [
    line("reward", curves.reward, "accent", { connectgaps: true }),
    ...curves.evaluations.map((one, i) => line(plain(one.name), one.mean, "second", {
      x: one.rl_s, mode: "lines+markers", marker: { size: 8, color: css("second"), symbol: i % 40 },
      line: { color: css("second"), width: 1.6, dash: dashes[i % dashes.length] },
      error_y: {
        type: "data", symmetric: false, array: one.high.map((high, j) => high - one.mean[j]),
        arrayminus: one.low.map((low, j) => one.mean[j] - low), color: css("second"), thickness: 0.8, width: 2,
      },
    })),
    ...(trained ? [line("entropy", curves.entropy, "third", { xaxis: "x", yaxis: "y2" })] : []), // an axis of nothing has no place
  ] : [], {
    showlegend: true, legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, font: { size: 12 } },
    margin: { l: 56, r: 16, t: 36, b: 44 }, xaxis: axis("time of the RL phase (s)", { anchor: trained ? "y2" : "y" }),
    yaxis: axis("reward, evaluations", { domain: [trained ? 0.44 : 0, 1] }), yaxis2: axis("entropy (nats)", { domain: [0, 0.34], rangemode: "tozero" }),
  });
}

function drawLearner(page) {
  const { steps, ...found } = page.learner, small = {};
  const names = {
    loss: "loss", grad_norm: "gradient norm", length: "mean response (tokens)", kl: "KL from the policy that drew (nats)",
    clipped: "share of the tokens clipped", effective: "effective sample size, share of the tokens",
  };
  const low = ["length", "kl", "clipped", "effective"], heads = [];
  const traces = Object.entries(names).map(([key, name], i) => {
    const n = i ? i + 1 : "", left = (i % 3) * 0.35, top = i < 3 ? [0.58, 0.95] : [0, 0.37];
    small[`xaxis${n}`] = axis(i < 3 ? "" : "step", { anchor: `y${n}`, domain: [left, left + 0.3], nticks: 5 });
    small[`yaxis${n}`] = axis("", { anchor: `x${n}`, domain: top, nticks: 5, ...(low.includes(key) ? { rangemode: "tozero" } : {}) });
    heads.push({ text: name, x: left, y: top[1], xref: "paper", yref: "paper", xanchor: "left", yanchor: "bottom", showarrow: false, font: { size: 12, color: css("muted") } });
    return {
      type: "scatter", mode: steps.length > 1 ? "lines" : "markers", x: steps, y: found[key], xaxis: `x${n}`, yaxis: `y${n}`,
      line: { color: css("accent"), width: 1.6 }, hovertemplate: `step %{x}<br>${name} %{y:.4g}<extra></extra>`,
    };
  });
  plot("learner", steps.length ? traces : [], { ...small, annotations: heads });
}

function drawConfig(page) {
  byId("config-panel").hidden = !page.config;
  byId("config").textContent = page.config;
}

function drawRelays(page) {
  const select = byId("relay-version"), hops = page.hops;
  const versions = [...new Set(hops.flatMap((hop) => hop.recent.map((one) => one[0])))].sort((a, b) => b - a);
  fillSelect(select, [["", "all: median and longest"], ...versions.map((v) => [String(v), String(v)])]);
  select.onchange = () => drawTree(hops, select.value === "" ? null : Number(select.value));
  select.onchange();
}

// Many subscribers of one relay are drawn as one leaf, with the longest of their times.
function together(hops, version) {
  const of = new Map();
  for (const hop of hops) if (!hop.is_relay) of.set(hop.parent, [...(of.get(hop.parent) || []), hop]);
  const merged = [...of].map(([parent, leaves]) => leaves.length < 5 ? leaves : [{
    ...leaves[0], name: `${leaves.length} of ${leaves[0].name} to ${leaves.at(-1).name}`, parent,
    worst_s: Math.max(...leaves.map((one) => one.worst_s)), median_s: leaves.map((one) => one.median_s).sort((a, b) => a - b)[leaves.length >> 1],
    recent: leaves.flatMap((one) => one.recent.filter((entry) => entry[0] === version)).sort((a, b) => b[1] - a[1]).slice(0, 1),
  }]);
  return [...hops.filter((hop) => hop.is_relay), ...merged.flat()];
}

function drawTree(all, version) {
  const hops = all.length > 24 ? together(all, version) : all;
  const box = byId("relays"), root = hops.find((hop) => hop.is_relay);
  if (!root) return box.replaceChildren(element("p", "Nothing yet.", "empty"));
  const children = new Map(hops.map((hop) => [hop.name, []])), told = new Map();
  const relays = new Set(hops.filter((hop) => hop.is_relay).map((hop) => hop.name));
  for (const hop of hops) {
    const one = version === null ? null : hop.recent.find((entry) => entry[0] === version);
    const parent = one ? one[2] || hop.parent : hop.parent;
    told.set(hop.name, one === null ? `${seconds(hop.median_s)}, longest ${seconds(hop.worst_s)}` : one ? seconds(one[1]) : "did not take it");
    if (hop !== root) children.get(children.has(parent) && parent !== hop.name ? parent : root.name).push(hop);
  }
  const rows = [], place = new Map();
  const walk = (hop, depth) => {
    if (place.has(hop.name)) return;
    place.set(hop.name, { depth, y: 0 });
    const below = children.get(hop.name);
    below.forEach((child) => walk(child, depth + 1));
    const own = below.map((child) => place.get(child.name)).filter((one) => one.depth === depth + 1);
    if (!own.length) rows.push(hop.name);
    place.get(hop.name).y = own.length ? (own[0].y + own[own.length - 1].y) / 2 : rows.length - 0.5;
  };
  walk(root, 0);
  const depth = Math.max(...[...place.values()].map((one) => one.depth)), pitch = 34, column = 330, words = new Map();
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const add = (tag, attributes, text) => {
    const made = document.createElementNS(svg.namespaceURI, tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    if (text !== undefined) made.textContent = text;
    svg.append(made);
  };
  svg.setAttribute("width", (depth + 1) * column), svg.setAttribute("height", Math.max(1, rows.length) * pitch + 8);
  for (const hop of hops.filter((one) => place.has(one.name))) {
    const share = !hop.is_relay ? "" : hop.wire_share >= 0.995 ? ", whole versions" : `, ${number(hop.wire_share * 100)} % of whole versions`;
    const left = hop.left_parent ? `, left its parent ${hop.left_parent} times` : "";
    words.set(hop.name, hop === root ? `${hop.versions} versions` : told.get(hop.name) + (version === null ? share + left : ""));
  }
  for (const [name, { depth: level, y }] of place)
    for (const child of children.get(name)) {
      const to = place.get(child.name), x = level * column + 30 + 6 * Math.max(name.length, words.get(name).length);
      const x2 = to.depth * column + 2, bend = (x2 - x) / 2;
      add("path", { d: `M${x},${y * pitch} C${x + bend},${y * pitch} ${x2 - bend},${to.y * pitch} ${x2},${to.y * pitch}` });
    }
  for (const [name, text] of words) {
    const { depth: level, y } = place.get(name), x = level * column + 8;
    add("circle", { cx: x, cy: y * pitch, r: 4, class: relays.has(name) ? "relay" : "leaf" });
    add("text", { x: x + 10, y: y * pitch + 1 }, name);
    add("text", { x: x + 10, y: y * pitch + 15, class: "note" }, text);
  }
  box.replaceChildren(svg);
  box.scrollTop = place.get(root.name).y * pitch - box.clientHeight / 2;
}

function table(heads, rows) {
  const made = element("table"), head = made.createTHead().insertRow(), body = made.createTBody();
  heads.forEach(([name, isNumber]) => head.append(element("th", name, isNumber ? "number" : "")));
  for (const cells of rows) {
    const row = body.insertRow();
    cells.forEach((cell, i) => row.append(element("td", cell, heads[i][1] ? "number" : "")));
  }
  return made;
}

function drawDrops(page) {
  const kinds = page.drops, filter = byId("drop-filter");
  const total = kinds.reduce((sum, kind) => sum + kind.count, 0);
  byId("drop-kinds").replaceChildren(table(
    [["reason"], ["count", 1], ["mean length (tokens)", 1], ["mean reward", 1], ["examples"]],
    kinds.map((kind) => [kind.reason, kind.count.toLocaleString("en"), number(kind.mean_length), number(kind.mean_reward), kind.examples.join(", ")])));
  const refill = () => {
    const wanted = filter.value.trim().toLowerCase();
    const rows = page.drop_rows.filter((row) => row.slice(0, 3).join(" ").toLowerCase().includes(wanted));
    const silent = kinds.find((kind) => kind.reason === "no_signal")?.count || 0, told = total - silent;
    const without = silent ? `${silent.toLocaleString("en")} without signal are counted, not listed. ` : "";
    byId("drop-note").textContent = !total ? "None was dropped." : told ? `${without}${rows.length} of ${told.toLocaleString("en")} others: the newest of each reason.` : without;
    const made = table(
      [["trajectory"], ["reason"], ["detail"], ["length (tokens)", 1], ["reward", 1], ["replica", 1], ["time (s)", 1]],
      rows.map(([id, reason, detail, length, reward, replica, at]) =>
        [id, reason, detail, String(length), number(reward), replica === null ? "–" : String(replica), at.toFixed(1)]));
    made.className = "lists";
    [...made.tBodies[0].rows].forEach((row, i) => (row.onclick = () => texts.visit(rows[i][0])));
    byId("drop-rows").replaceChildren(told ? made : "");
  };
  filter.oninput = refill;
  refill();
}
