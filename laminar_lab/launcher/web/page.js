// The page of an experiment, after `kit.js`. Whatever text comes from runs is set as text.
const COLOURS = 8, DASHES = ["solid", "dash", "dot", "dashdot"];
const hidden = new Set();

function look(variant, variants) {
  const place = variants.indexOf(variant);
  return { colour: css(`v${place % COLOURS}`), dash: DASHES[Math.floor(place / COLOURS) % DASHES.length] };
}

function faint(colour) {
  return `${colour}33`;
}

function traces(chart, variants) {
  return chart.bands.filter((band) => !hidden.has(band.name)).flatMap((band) => {
    const { colour, dash } = look(band.name, variants), many = band.seeds > 1;
    const edge = (y, fill) => ({
      type: "scatter", mode: "lines", x: band.x, y, line: { width: 0, color: colour }, fillcolor: faint(colour), fill, hoverinfo: "skip",
    });
    const points = band.x.length < 30 ? "lines+markers" : "lines";
    const middle = {
      type: "scatter", mode: points, x: band.x, y: band.mean, name: plain(band.name), line: { color: colour, width: 1.8, dash },
      marker: { size: 5, color: colour }, customdata: band.x.map((_, i) => [band.low[i], band.high[i]]),
      hovertemplate: `${plain(band.name)}<br>%{y:.4~g} (%{customdata[0]:.4~g} to %{customdata[1]:.4~g}, seeds: ${band.seeds})<br>${plain(chart.x)} %{x:.4~s}<extra></extra>`,
    };
    return many ? [edge(band.low, "none"), edge(band.high, "tonexty"), middle] : [middle];
  });
}

function drawCharts(page) {
  page.charts.forEach((chart, i) => plot(`chart-${i}`, traces(chart, page.variants), {
    xaxis: axis(chart.x, { rangemode: "tozero" }), yaxis: axis(chart.y),
  }));
}

function makeCharts(page) {
  byId("charts").replaceChildren(...page.charts.map((chart, i) => {
    const panel = element("section", undefined, "panel"), box = element("div", undefined, "chart");
    box.id = `chart-${i}`;
    panel.append(element("h2", chart.title), box);
    return panel;
  }));
}

function swatch(variant, page) {
  const space = "http://www.w3.org/2000/svg", { colour, dash } = look(variant, page.variants);
  const drawing = document.createElementNS(space, "svg"), line = document.createElementNS(space, "line");
  Object.entries({ width: 26, height: 8 }).forEach(([name, value]) => drawing.setAttribute(name, value));
  const dashes = { solid: "", dash: "7 4", dot: "2 3", dashdot: "7 3 2 3" }[dash];
  Object.entries({ x1: 0, x2: 26, y1: 4, y2: 4, stroke: colour, "stroke-width": 3, "stroke-dasharray": dashes })
    .forEach(([name, value]) => line.setAttribute(name, value));
  drawing.append(line);
  return drawing;
}

function drawLegend(page) {
  byId("legend").replaceChildren(...page.variants.map((variant, i) => {
    const label = element("label"), box = element("input");
    Object.assign(box, { type: "checkbox", checked: !hidden.has(variant) });
    box.onchange = () => {
      if (box.checked) hidden.delete(variant);
      else hidden.add(variant);
      drawCharts(page);
    };
    label.append(box, swatch(variant, page), variant, element("small", page.counted[i]));
    return label;
  }));
}

const page = data;

function drawPage() {
  document.title = `${page.name} · laminar`;
  byId("name").textContent = page.name;
  byId("state").textContent = page.state;
  drawCards(page.headline);
  for (const place of ["first", "last"]) byId(place).replaceChildren(...page[place].map(sheet));
  drawLegend(page);
  drawCharts(page);
}

makeCharts(page);
drawPage();
scheme.addEventListener("change", drawPage);
window.laminar = { page };
