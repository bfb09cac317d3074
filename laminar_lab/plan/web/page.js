// The page of a plan, after `kit.js`. Whatever text comes from a plan is set as text.
const page = data;
const whole = (value) => Number(value).toLocaleString("en", { maximumFractionDigits: 0 });
const label = (row) => `${row.schedule}, ${row.learner_gpus} + ${row.replicas} × ${row.tensor_parallel}`;
const SCHEDULES = { async: "accent", one_step: "second", sync: "third" };
const PARTS = ["#0072b2", "#56b4e9", "#009e73", "#b8860b", "#d55e00", "#cc79a7", "#7f5fc4", "#8c564b", "#9aa3ab", "#667078", "#b5a26a", "#3f5f4f"];

function price(row) {
  return row.cost === null ? `${number((1000 * row.step_s) / 3600)} h` : whole(row.cost);
}

function headline() {
  const best = page.rows[0];
  return [
    { name: "first choice", value: label(best), note: "schedule, learner GPUs + replicas × tensor parallelism" },
    { name: "trained tokens/s", value: whole(best.tokens_per_s), note: `a step in ${number(best.step_s)} s` },
    { name: "staleness", value: number(best.staleness_mean), note: `at most ${best.staleness_max} steps` },
    { name: "binds", value: best.binds, note: `then ${best.binds_next}` },
    { name: "1,000 steps", value: price(best), note: page.price === null ? "give --price for a cost" : `at ${page.price} a GPU-hour` },
  ];
}

function ranking() {
  const rows = page.rows.map((row, i) => [
    String(i + 1), row.schedule, String(row.learner_gpus), `${row.replicas} × ${row.tensor_parallel}`, whole(row.max_batch),
    whole(row.batch_per_replica), whole(row.tokens_per_s), number(row.step_s), `${number(row.staleness_mean)}, max ${row.staleness_max}`,
    String(row.versions_alive), price(row), `${row.binds}, then ${row.binds_next}`,
  ]);
  const head = ["", "schedule", "learner GPUs", "replicas × TP", "decode", "admits", "tokens/s", "step, s", "staleness", "versions", "1,000 steps", "binds"];
  return { title: "Placements, the best first", note: `${page.considered} fit; these were simulated.`, head, rows, words: 1 };
}

function points() {
  return Object.entries(SCHEDULES).map(([schedule, colour]) => {
    const rows = page.rows.filter((row) => row.schedule === schedule);
    return {
      type: "scatter", mode: "markers", name: schedule, x: rows.map((row) => row.staleness_mean), y: rows.map((row) => row.tokens_per_s),
      text: rows.map((row) => plain(label(row))), hovertemplate: "%{text}<br>staleness %{x:.2f}<br>%{y:,.0f} tokens/s<extra></extra>",
      marker: { size: 11, color: css(colour) },
    };
  });
}

function drawStaleness() {
  const bounds = page.by_bound.map((one) => one.label), line = {
    type: "scatter", mode: "lines+markers", name: "by formula", x: bounds, y: page.by_bound.map((one) => one.tokens_per_s), xaxis: "x2",
    line: { color: css("quiet"), dash: "dot" }, hovertemplate: "bound: %{x}<br>%{y:,.0f} tokens/s<extra>by formula</extra>",
  };
  plot("by-staleness", [...points(), line], {
    xaxis: axis("mean staleness, steps (points)", { rangemode: "tozero" }),
    xaxis2: axis("bound (line)", { overlaying: "x", side: "top", type: "category" }),
    yaxis: axis("trained tokens/s", { rangemode: "tozero" }), showlegend: true, legend: { orientation: "h", y: -0.28 },
    margin: { l: 64, r: 16, t: 48, b: 44 },
  });
}

function drawGpus() {
  const x = page.by_gpus.map((one) => one.gpus), cost = (one) => one.hours * (page.price === null ? 1 : one.gpus * page.price);
  plot("by-gpus", [
    { type: "scatter", mode: "lines+markers", name: "tokens/s", x, y: page.by_gpus.map((one) => one.tokens_per_s), line: { color: css("accent") } },
    { type: "scatter", mode: "lines+markers", name: page.price === null ? "hours" : "cost", x, y: page.by_gpus.map(cost), yaxis: "y2", line: { color: css("second"), dash: "dot" } },
  ], {
    xaxis: axis("GPUs", { type: "log", tickvals: x, ticktext: x.map(String) }), yaxis: axis("trained tokens/s", { rangemode: "tozero" }),
    yaxis2: axis(page.price === null ? "hours of 1,000 steps" : "cost of 1,000 steps", { overlaying: "y", side: "right", rangemode: "tozero", showgrid: false }),
    showlegend: true, legend: { orientation: "h", y: -0.28 }, margin: { l: 64, r: 64, t: 16, b: 44 },
  });
}

function drawStages() {
  const names = page.rows.map((row, i) => `${i + 1}. ${plain(label(row))}`);
  const stages = { generation: "accent", learner: "second", weights: "third", freshness: "quiet" };
  plot("stages", Object.entries(stages).map(([stage, colour]) => ({
    type: "bar", name: stage, orientation: "h", y: names, x: page.rows.map((row) => row[`${stage}_s`]), marker: { color: css(colour) },
    hovertemplate: `${stage} %{x:.1f} s<extra></extra>`,
  })), { barmode: "group", bargap: 0.25, xaxis: axis("s"), yaxis: axis("", { autorange: "reversed" }), showlegend: true, legend: { orientation: "h", y: -0.2 } });
}

function drawMemory() {
  const best = page.rows[0], kinds = { learner: best.learner_memory, engine: best.engine_memory };
  const names = [...new Set(Object.values(kinds).flatMap((parts) => Object.keys(parts).filter((name) => parts[name] > 0)))];
  plot("memory", names.map((name, i) => ({
    type: "bar", name: plain(name), x: Object.keys(kinds), y: Object.values(kinds).map((parts) => (parts[name] ?? 0) / 1e9),
    marker: { color: PARTS[i % PARTS.length] }, hovertemplate: `${plain(name)} %{y:.1f} GB<extra></extra>`,
  })), { barmode: "stack", bargap: 0.4, xaxis: axis(""), yaxis: axis("GB"), showlegend: true });
}

function drawPage() {
  byId("name").textContent = page.model;
  byId("state").textContent = `on ${page.fleet}`;
  drawCards(headline());
  byId("ranking").replaceChildren(sheet(ranking()));
  byId("words").replaceChildren(...page.words.map((line) => element("li", line)));
  byId("formulas").replaceChildren(sheet({ title: "The first choice, formula by formula", head: ["formula", "with its numbers", "gives"], rows: page.formulas, words: 2 }));
  drawStaleness();
  drawGpus();
  drawStages();
  drawMemory();
}

drawPage();
scheme.addEventListener("change", drawPage);
window.laminar = { page };
