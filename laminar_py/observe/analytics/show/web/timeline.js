// The timeline, on a canvas: replicas, learner and relays on one time axis. Far away a replica is an area, as high as
// what it runs and coloured by the mean version; near enough, every stay of a trajectory is a bar.
"use strict";

const VIEWS = { uint8: Uint8Array, uint16: Uint16Array, uint32: Uint32Array, int32: Int32Array, float32: Float32Array };
const FATES = ["runs", "finished here", "was interrupted", "was dropped", "was moved by a repack"]; // `stays.StayEnd`
const DROPPED = 3, MOVED = 4;
const MOST_BARS = 9000, MOST_ARROWS = 80, MOST_MARKS = 240, GUTTER = 92, AXIS = 26, ROW = 26, RELAY_ROW = 13, GAP = 8;
const RAMP = [[68, 1, 84], [72, 40, 120], [62, 74, 137], [49, 104, 142], [38, 130, 142], [31, 158, 137], [53, 183, 121], [109, 205, 89], [180, 222, 44], [253, 231, 37]];

function unpack(packed) {
  const text = atob(packed.data), bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return new VIEWS[packed.type](bytes.buffer);
}

function ramp(share) {
  const dark = scheme.matches; // the end that would sink into the ground is left out
  const x = (dark ? 0.16 + 0.84 * share : 0.9 * share) * (RAMP.length - 1), i = Math.min(RAMP.length - 2, Math.floor(x));
  const mix = RAMP[i].map((low, k) => Math.round(low + (RAMP[i + 1][k] - low) * (x - i)));
  return `rgb(${mix.join(",")})`;
}

function firstAtLeast(sorted, value) {
  let low = 0, high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low;
}

class Timeline {
  constructor() {
    this.view = null; // [from, to] in seconds; null: the whole run
    this.mode = "";
    this.drawn = {};
    this.frame = 0;
    this.hits = []; // what the pointer can find: [x, y, width, height, tell]
  }

  show(data) {
    const first = !this.data;
    this.data = data;
    this.bars = Object.fromEntries(Object.entries(data.bars).map(([name, value]) => [name, value?.type ? unpack(value) : value]));
    this.heat = { running: unpack(data.heat.running), version: unpack(data.heat.version), away: data.heat.away && unpack(data.heat.away) };
    const { start, end } = this.bars, order = Uint32Array.from(start.keys()).sort((a, b) => start[a] - start[b]);
    this.order = order;
    this.sortedStarts = Uint32Array.from(order, (i) => start[i]);
    this.longest = start.reduce((most, from, i) => Math.max(most, end[i] - from), 0);
    fillSelect(byId("timeline-replica"), [["", "all"], ...data.replicas.map((replica, row) => [String(row), String(replica)])]);
    if (first) this.listen();
    this.redraw();
  }

  get whole() {
    return [this.data.start_s, Math.max(this.data.end_s, this.data.start_s + 0.001)];
  }

  get span() {
    return this.view || this.whole;
  }

  zoom(from, to) {
    const [start, end] = this.whole, width = Math.max(0.002, Math.min(to - from, end - start));
    const left = Math.min(Math.max(from, start), end - width);
    this.view = width >= (end - start) * 0.999 ? null : [left, left + width];
    this.redraw();
  }

  zoomBy(factor, about = null) {
    const [from, to] = this.span, fixed = about === null ? (from + to) / 2 : about;
    this.zoom(fixed - (fixed - from) * factor, fixed + (to - fixed) * factor);
  }

  redraw() {
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this.draw());
  }

  // ---- geometry

  layOut() {
    const focus = byId("timeline-replica").value, rows = this.data.replicas.length;
    this.focus = focus === "" ? null : Number(focus);
    const even = Math.max(12, Math.min(170, Math.floor(460 / Math.max(1, rows))));
    const gap = even < 24 ? 2 : GAP;
    let y = AXIS + ROW + 18;
    this.bands = this.data.replicas.map((_, row) => {
      const height = this.focus === null ? even : row === this.focus ? 520 : 0;
      const band = { y, height };
      y += height ? height + gap : 0;
      return band;
    });
    this.relayTop = y + 10;
    this.width = Math.max(320, byId("timeline-frame").clientWidth);
    this.height = this.relayTop + this.data.relays.length * RELAY_ROW + 8;
  }

  x(seconds) {
    const [from, to] = this.span;
    return GUTTER + ((seconds - from) / (to - from)) * (this.width - GUTTER - 8);
  }

  seconds(x) {
    const [from, to] = this.span;
    return from + ((x - GUTTER) / (this.width - GUTTER - 8)) * (to - from);
  }

  visibleBars() {
    const [from, to] = this.span.map((s) => (s - this.data.start_s) * 1000), { end, replica } = this.bars;
    const found = [];
    for (let k = firstAtLeast(this.sortedStarts, from - this.longest); k < this.order.length && this.sortedStarts[k] <= to; k++) {
      const bar = this.order[k];
      if (end[bar] >= from && this.bands[replica[bar]].height) found.push(bar);
      if (found.length > MOST_BARS) return null;
    }
    return found;
  }

  // ---- drawing

  draw() {
    this.layOut();
    const canvas = byId("timeline-canvas"), scale = window.devicePixelRatio || 1;
    canvas.width = this.width * scale, canvas.height = this.height * scale;
    canvas.style.width = `${this.width}px`, canvas.style.height = `${this.height}px`;
    const pen = (this.pen = canvas.getContext("2d"));
    pen.scale(scale, scale);
    pen.font = `12px ${getComputedStyle(document.body).fontFamily}`;
    this.hits = [];
    this.drawn = { bars: 0, areas: 0, arrows: 0, ticks: 0, steps: 0, transfers: 0, marks: 0 };
    const visible = this.visibleBars();
    this.mode = visible === null ? "areas" : "bars";
    this.rangeVersions(visible);
    this.drawAxis();
    pen.save();
    pen.beginPath();
    pen.rect(GUTTER, AXIS - 4, this.width - GUTTER - 4, this.height);
    pen.clip();
    for (const band of this.bands) if (band.height) this.box(GUTTER, band.y, this.width, band.height, css("track"));
    if (visible === null) this.drawAreas();
    else this.drawBars(visible);
    this.drawLearner();
    this.drawRelays();
    this.drawMarks();
    this.drawMoves(visible);
    pen.restore();
    this.drawLabels();
    this.tellState();
  }

  box(x, y, width, height, colour) {
    this.pen.fillStyle = colour;
    this.pen.fillRect(x, y, width, height);
  }

  // A box that is the paler, the larger the share of its time that was spent in environments.
  paleBox(x, y, width, height, colour, share) {
    this.pen.globalAlpha = 1 - 0.65 * share;
    this.box(x, y, width, height, colour);
    this.pen.globalAlpha = 1;
  }

  rangeVersions(visible) {
    const [from, to] = this.span, { heat } = this.data;
    let low = Infinity, high = -Infinity;
    const see = (version) => version >= 0 && ((low = Math.min(low, version)), (high = Math.max(high, version)));
    if (visible) for (const bar of visible) see(this.bars.version[bar]);
    else
      for (let row = 0; row < this.bands.length; row++)
        for (let bin = Math.max(0, Math.floor((from - heat.start_s) / heat.bin_s)); bin < heat.bins && heat.start_s + bin * heat.bin_s < to; bin++)
          see(this.heat.version[row * heat.bins + bin]);
    this.versions = low <= high ? [Math.floor(low), Math.ceil(high)] : [0, 0];
  }

  colour(version) {
    const [low, high] = this.versions;
    return version < 0 || Number.isNaN(version) ? css("quiet") : ramp(high > low ? Math.min(1, Math.max(0, (version - low) / (high - low))) : 0.5);
  }

  drawAxis() {
    const [from, to] = this.span, pen = this.pen, rough = (to - from) / Math.max(2, (this.width - GUTTER) / 110);
    const power = 10 ** Math.floor(Math.log10(rough)), step = [1, 2, 5, 10].find((k) => k * power >= rough) * power;
    pen.fillStyle = css("muted"), pen.textAlign = "center", pen.textBaseline = "alphabetic";
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    for (let tick = Math.ceil(from / step) * step; tick <= to; tick += step) {
      const x = this.x(tick);
      this.box(x, AXIS - 6, 1, this.height, css("line"));
      pen.fillStyle = css("muted"), pen.textAlign = x > this.width - 30 ? "right" : "center"; // the last one whole
      pen.fillText(`${tick.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits })} s`, Math.min(x, this.width - 2), AXIS - 10);
    }
  }

  drawAreas() {
    const { heat, most_running: most } = this.data, [from, to] = this.span;
    const first = Math.max(0, Math.floor((from - heat.start_s) / heat.bin_s)), last = Math.min(heat.bins, Math.ceil((to - heat.start_s) / heat.bin_s));
    this.bands.forEach(({ y, height }, row) => {
      if (!height) return;
      for (let bin = first; bin < last; bin++) {
        const running = this.heat.running[row * heat.bins + bin], version = this.heat.version[row * heat.bins + bin];
        if (!(running > 0)) continue;
        const x = this.x(heat.start_s + bin * heat.bin_s), right = this.x(heat.start_s + (bin + 1) * heat.bin_s);
        const tall = Math.max(1, Math.min(1, running / most) * height);
        const away = this.heat.away ? tall * Math.min(1, this.heat.away[row * heat.bins + bin] / running) : 0;
        this.box(x, y + height - tall + away, right - x + 0.3, tall - away, this.colour(version));
        if (away) this.paleBox(x, y + height - tall, right - x + 0.3, away, this.colour(version), 1);
        this.drawn.areas++;
      }
      this.hits.push([GUTTER, y, this.width, height, (x) => this.tellArea(row, x)]);
    });
  }

  tellArea(row, x) {
    const { heat, replicas } = this.data, bin = Math.floor((this.seconds(x) - heat.start_s) / heat.bin_s);
    const running = this.heat.running[row * heat.bins + bin] || 0, version = this.heat.version[row * heat.bins + bin];
    const words = Number.isNaN(version) ? "" : `\nmean version ${number(version, 4)}`;
    const away = this.heat.away ? `, ${number(this.heat.away[row * heat.bins + bin] || 0)} of them in environments` : "";
    return `replica ${replicas[row]} at ${number(this.seconds(x), 5)} s\n${number(running)} trajectories running${away}${words}`;
  }

  drawBars(visible) {
    const { is_eval: isEval, of } = this.bars;
    this.places = new Map();
    this.drawn.bars = visible.length;
    for (const layer of [1, 0]) this.drawLayer(visible.filter((bar) => isEval[of[bar]] === layer)); // training in front
  }

  // Lanes of training from below, of evaluations from above, each as high as its own number leaves them.
  drawLayer(bars) {
    const { replica, start, end, version, is_eval: isEval, of, fate, away } = this.bars, free = this.bands.map(() => []);
    const lane = new Map();
    for (const bar of bars) {
      const ends = free[replica[bar]];
      let row = ends.findIndex((until) => until <= start[bar]);
      if (row < 0) row = ends.length;
      ends[row] = end[bar];
      lane.set(bar, row);
    }
    const base = this.data.start_s;
    for (const bar of bars) {
      const band = this.bands[replica[bar]], pitch = Math.min(9, band.height / Math.max(1, free[replica[bar]].length));
      const x = this.x(base + start[bar] / 1000), width = Math.max(1, this.x(base + end[bar] / 1000) - x - (pitch > 3 ? 0.6 : 0));
      const tall = Math.max(0.8, pitch > 3 ? pitch - 1 : pitch), low = (lane.get(bar) + 1) * pitch;
      const y = isEval[of[bar]] ? band.y + low - pitch : band.y + band.height - low;
      this.paleBox(x, y, width, tall, isEval[of[bar]] ? css("quiet") : this.colour(version[bar]), away ? away[bar] : 0);
      if (fate[bar] === DROPPED && pitch > 2) this.box(x + width - 2, y, 2, tall, css("alarm"));
      this.places.set(bar, [x, y + tall / 2, width]);
      this.hits.push([x, y, Math.max(3, width), Math.max(2, tall), () => this.tellBar(bar)]);
    }
  }

  tellBar(bar) {
    const b = this.bars, which = b.of[bar], base = this.data.start_s, lines = [];
    lines.push(`${b.ids[which]}${b.is_eval[which] ? " (evaluation)" : ""} on replica ${this.data.replicas[b.replica[bar]]}, version ${b.version[bar]}`);
    lines.push(`${(base + b.start[bar] / 1000).toFixed(2)} s to ${(base + b.end[bar] / 1000).toFixed(2)} s; ${FATES[b.fate[bar]]}`);
    lines.push(`${b.length[which].toLocaleString("en")} tokens, reward ${Number.isNaN(b.reward[which]) ? "–" : number(b.reward[which])}`);
    if (b.turns && b.turns[which] >= 0) lines.push(`${b.turns[which]} turns, ${seconds(b.environment_s[which])} in its environment`);
    lines.push(b.statuses[b.status[which]] + (b.staleness[which] >= 0 && !b.is_eval[which] ? ` at staleness ${b.staleness[which]}` : ""));
    return lines.join("\n");
  }

  drawLearner() {
    const y = AXIS + 2;
    this.box(GUTTER, y, this.width, ROW - 4, css("track"));
    for (const [step, from, to, waited, count, tokens, reward] of this.data.steps) {
      const x = this.x(from), right = this.x(to);
      if (right < GUTTER || x > this.width) continue;
      this.box(x, y, Math.max(1, right - x - 0.7), ROW - 4, css("accent"));
      this.drawn.steps++;
      this.hits.push([x, y, Math.max(3, right - x), ROW - 4, () =>
        `learner, step ${step}\n${seconds(to - from)}, after ${seconds(waited)} without a batch\n` +
        `${count.toLocaleString("en")} trajectories, ${tokens.toLocaleString("en")} tokens, reward ${number(reward)}`]);
    }
  }

  drawRelays() {
    this.data.relays.forEach((_, row) => this.box(GUTTER, this.relayTop + row * RELAY_ROW, this.width, RELAY_ROW - 3, css("track")));
    for (const [row, from, to, version, text] of this.data.transfers) {
      const x = this.x(from), width = Math.max(2, this.x(to) - x), y = this.relayTop + row * RELAY_ROW;
      if (x + width < GUTTER || x > this.width) continue;
      this.box(x, y, width, RELAY_ROW - 3, this.colour(version));
      this.drawn.transfers++;
      this.hits.push([x - 1, y, width + 2, RELAY_ROW, () => `${this.data.relays[row]}: version ${version} in ${seconds(to - from)}\n${text}`]);
    }
  }

  drawMarks() {
    const pen = this.pen, low = AXIS + ROW + 2, [from, to] = this.span;
    const many = this.data.marks.filter(([at]) => at >= from && at <= to).length > MOST_MARKS;
    for (const [at, kind, row, version, text] of this.data.marks) {
      const x = this.x(at), band = row >= 0 ? this.bands[row] : null;
      if (x < GUTTER - 4 || x > this.width || (band && !band.height)) continue;
      const y = kind === "load" ? band.y + band.height : band ? band.y + 6 : low;
      pen.fillStyle = kind === "load" ? css("ink") : css(kind === "publish" ? "second" : kind === "checkpoint" ? "third" : "alarm");
      const small = kind === "publish" || kind === "load", top = kind === "load" ? y - 5 : y;
      pen.beginPath();
      if (small && many) pen.rect(x - 0.5, top, 1, 5);
      else if (small) pen.moveTo(x, top), pen.lineTo(x - 3, top + 6), pen.lineTo(x + 3, top + 6);
      else pen.rect(x - 3, y + (kind === "checkpoint" ? 8 : 0), 6, 6);
      pen.fill();
      this.drawn.marks++;
      const words = { publish: `version ${version} published`, load: `version ${version} loaded`, checkpoint: "checkpoint", death: "died", rollback: "roll-back" }[kind];
      this.hits.push([x - 4, y - 5, 8, kind === "checkpoint" ? 20 : 12, () => `${words} at ${at.toFixed(2)} s\n${text}`]);
    }
  }

  drawMoves(visible) {
    const [from, to] = this.span, moves = this.data.moves.filter(([at]) => at >= from && at <= to);
    this.crowded = moves.length > MOST_ARROWS;
    const single = visible ? this.movesOfBars(visible) : [];
    if (single.length && single.length <= 4 * MOST_ARROWS) single.forEach((arrow) => this.arrow(...arrow));
    else if (this.focus === null) moves.forEach((move) => this.drawMove(...move));
  }

  drawMove(at, source, destination, count, repacked) {
    const [a, b] = [this.bands[source], this.bands[destination]], x = this.x(at), names = this.data.replicas;
    const text = `${count} trajectories from replica ${names[source]} to ${names[destination]} at ${at.toFixed(1)} s`;
    const down = destination > source;
    if (!this.crowded) return this.arrow(x, a.y + a.height * (down ? 0.8 : 0.2), x, b.y + b.height * (down ? 0.2 : 0.8), 1 + Math.log2(count) / 3, repacked, text);
    this.box(x - 0.5, a.y, 1.5, Math.min(7, a.height / 4), css(repacked ? "second" : "alarm"));
    this.hits.push([x - 3, a.y, 6, 9, () => text]);
    this.drawn.ticks++;
  }

  movesOfBars(visible) {
    const { of, fate } = this.bars, arrows = [];
    for (const bar of visible)
      if (of[bar + 1] === of[bar] && this.places.has(bar + 1)) {
        const [x, y, width] = this.places.get(bar), [x2, y2] = this.places.get(bar + 1);
        arrows.push([x + width, y, x2, y2, 1, fate[bar] === MOVED, `${this.bars.ids[of[bar]]} ${FATES[fate[bar]]}`]);
      }
    return arrows;
  }

  arrow(x, y, x2, y2, width, repacked, text) {
    const pen = this.pen, up = y2 < y ? 1 : -1, head = 4 + width;
    pen.strokeStyle = pen.fillStyle = css(repacked ? "second" : "alarm"), pen.lineWidth = width;
    pen.beginPath(), pen.moveTo(x, y), pen.lineTo(x2, y2 + up * head * 0.8), pen.stroke();
    pen.beginPath(), pen.moveTo(x2, y2), pen.lineTo(x2 - head / 2, y2 + up * head), pen.lineTo(x2 + head / 2, y2 + up * head), pen.fill();
    this.drawn.arrows++;
    this.hits.push([Math.min(x, x2) - 4, Math.min(y, y2), Math.abs(x2 - x) + 8, Math.abs(y2 - y), () => text]);
  }

  drawLabels() {
    const pen = this.pen, write = (text, y) => ((pen.fillStyle = css("muted")), pen.fillText(text, GUTTER - 10, y));
    pen.textAlign = "right", pen.textBaseline = "middle";
    write("learner", AXIS + ROW / 2);
    const rows = this.bands.filter((band) => band.height).length, every = Math.ceil((rows * 12) / 460);
    this.bands.forEach(({ y, height }, row) => {
      if (height && (row % every === 0 || this.focus !== null)) write(`replica ${this.data.replicas[row]}`, y + height / 2);
    });
    const relays = this.data.relays.length;
    this.data.relays.forEach((name, row) => relays <= 40 && write(name, this.relayTop + row * RELAY_ROW + 5));
    if (relays > 40) write(`${relays} relays`, this.relayTop + (relays * RELAY_ROW) / 2);
  }

  tellState() {
    const { trajectories, shown, most_running: most } = this.data, [low, high] = this.versions;
    const parts = [`${trajectories.toLocaleString("en")} trajectories.`];
    parts.push(this.mode === "bars"
      ? `Each bar is one on its replica (${this.drawn.bars.toLocaleString("en")} here).`
      : `Height: how many run at a time, up to the ${number(most)} of training; evaluations may be more. Zoom in for single trajectories.`);
    if (this.crowded) parts.push("Orange ticks on a replica are repacks away from it, arrows when near.");
    if (shown < trajectories) parts.push(`Bars show 1 in ${number(trajectories / shown, 2)}, chosen by number; heights and arrows count all.`);
    parts.push("Time counts from the first trajectory. Drag to zoom in, double-click for the whole run, Ctrl + wheel at the pointer, arrow keys to move.");
    byId("timeline-note").textContent = parts.join(" ");
    const legend = byId("timeline-legend"), item = (colour, text, className) => {
      const one = element("span"), mark = element("i", undefined, className);
      mark.style.background = colour;
      one.append(mark, text);
      return one;
    };
    const stops = [0, 0.25, 0.5, 0.75, 1].map(ramp).join(",");
    legend.replaceChildren(
      item(high > low ? `linear-gradient(90deg,${stops})` : ramp(0.5), high > low ? `weight version ${low} to ${high}` : `weight version ${low}`, "ramp"),
      ...(this.mode === "bars" ? [item(css("quiet"), "evaluation")] : []), ...(this.heat.away ? [item(`linear-gradient(90deg,${ramp(0.5)},${css("track")})`, "the paler, the more time in environments")] : []), item(css("accent"), "learner step"), item(css("second"), "publish (▲), repack (arrow)"),
      item(css("ink"), "weights loaded (▲)"), item(css("third"), "checkpoint"), item(css("alarm"), "drop, death, other move"));
  }

  // ---- the pointer

  listen() {
    const canvas = byId("timeline-canvas"), at = (event) => [event.offsetX, event.offsetY];
    let from = null;
    canvas.addEventListener("pointerdown", (event) => (from = event.offsetX));
    canvas.addEventListener("pointermove", (event) => {
      if (from === null) return this.hover(...at(event));
      this.draw();
      this.pen.globalAlpha = 0.18;
      this.box(Math.min(from, event.offsetX), AXIS, Math.abs(event.offsetX - from), this.height, css("accent"));
      this.pen.globalAlpha = 1;
    });
    window.addEventListener("pointerup", (event) => {
      const [a, b] = [from, event.target === canvas ? event.offsetX : from];
      from = null;
      if (a !== null && Math.abs(b - a) > 4) this.zoom(this.seconds(Math.min(a, b)), this.seconds(Math.max(a, b)));
      else if (a !== null) this.redraw();
    });
    canvas.addEventListener("pointerleave", () => (byId("tip").hidden = true));
    canvas.addEventListener("dblclick", () => this.zoom(...this.whole));
    canvas.addEventListener("wheel", (event) => {
      const [left, right] = this.span;
      if (event.ctrlKey) this.zoomBy(1.2 ** Math.sign(event.deltaY), this.seconds(event.offsetX));
      else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.zoom(...this.span.map((s) => s + ((right - left) * event.deltaX) / 1000));
      else return;
      event.preventDefault();
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => {
      const [left, right] = this.span, act = {
        ArrowLeft: () => this.zoom(left - (right - left) / 5, right - (right - left) / 5),
        ArrowRight: () => this.zoom(left + (right - left) / 5, right + (right - left) / 5),
        "+": () => this.zoomBy(0.5), "-": () => this.zoomBy(2),
      }[event.key];
      if (act) act(), event.preventDefault();
    });
    byId("zoom-in").onclick = () => this.zoomBy(0.5);
    byId("zoom-out").onclick = () => this.zoomBy(2);
    byId("zoom-all").onclick = () => this.zoom(...this.whole);
    byId("timeline-replica").onchange = () => this.redraw();
    new ResizeObserver(() => this.data && byId("timeline-frame").clientWidth !== this.width && this.redraw()).observe(byId("timeline-frame"));
  }

  hover(x, y) {
    const tip = byId("tip"), hit = this.hits.findLast(([left, top, width, height]) => x >= left && x <= left + width && y >= top && y <= top + height);
    tip.hidden = !hit || x < GUTTER;
    if (tip.hidden) return;
    tip.textContent = hit[4](x, y);
    const frame = byId("timeline-frame"), panel = byId("timeline").clientWidth;
    tip.style.left = `${Math.min(x + frame.offsetLeft + 14, panel - tip.offsetWidth - 8)}px`;
    tip.style.top = `${y - frame.scrollTop + frame.offsetTop + 14}px`;
  }
}

const timeline = new Timeline();
