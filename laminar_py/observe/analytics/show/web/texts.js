// The panel of texts: a list with filters, one response with all that is beside it. It reads from a source that has
// `list(query)` and `read(id)`: texts that are in the page, or a server that is asked. Text of models, data and
// verifiers is set as text, never as markup.
"use strict";

const CHOICES = ["order", "kind", "status", "reason"], COMPARISONS = ["step", "reward", "length", "staleness"];
const FIELDS = { // of the filters: name, a hint
  prompt: "p17", group: "g17", set: "heldout", step: ">3", reward: "0", length: ">100", staleness: ">2", version: "3", replica: "0",
};
const COMPARED = {
  "=": (a, b) => a === b, "!=": (a, b) => a !== b, "<": (a, b) => a < b, "<=": (a, b) => a <= b, ">": (a, b) => a > b, ">=": (a, b) => a >= b,
};
const SORTED = { // order: what it goes by, and the sign; equal ones the newest first
  newest: ["number", -1], oldest: ["number", 1], best: ["reward", -1], worst: ["reward", 1],
  longest: ["length", -1], shortest: ["length", 1], stalest: ["staleness", -1],
};

const setOf = (row) => (row.kind === "eval" ? row.group_id.slice(row.group_id.indexOf("-") + 1) : null);
const versionsOf = (row) => row.oldest_version === null ? "–" : row.oldest_version === row.newest_version ? String(row.oldest_version) : `${row.oldest_version} to ${row.newest_version}`;

function comparison(name, text) {
  const found = /^(>=|<=|!=|>|<|=)?\s*(-?\d+(?:\.\d+)?)$/.exec(text.trim());
  if (!found) throw new Error(`${name}=${text}: not a comparison; write for example '>3', '<=1' or '2'`);
  return (value) => value !== null && COMPARED[found[1] || "="](value, Number(found[2]));
}

class EmbeddedTexts {
  constructor({ samples }, command) {
    this.command = command;
    this.samples = new Map(samples.map((one) => [one.row.id, one]));
  }

  async list({ order = "newest", limit, ...query }) {
    const tests = Object.entries(query).map(([name, wanted]) => this.test(name, wanted));
    const rows = [...this.samples.values()].map((one) => one.row).filter((row) => tests.every((test) => test(row)));
    return { rows: order === "contrast" ? this.contrasts(rows) : this.sorted(rows, order), matching: rows.length };
  }

  test(name, wanted) {
    if (COMPARISONS.includes(name)) {
      const holds = comparison(name, wanted);
      return (row) => holds(row[name]);
    }
    if (["version", "replica"].includes(name) && !/^\d{1,18}$/.test(wanted)) throw new Error(`${name}=${wanted}: not a whole number; write for example ${name}=3`);
    if (name === "set") return (row) => setOf(row) === wanted;
    if (name === "version") return (row) => row.oldest_version !== null && row.oldest_version <= Number(wanted) && Number(wanted) <= row.newest_version;
    const field = { reason: "drop_reason", group: "group_id", prompt: "prompt_id" }[name] || name;
    return (row) => row[field] !== null && String(row[field]) === wanted;
  }

  sorted(rows, order) {
    const [by, sign] = SORTED[order], known = order === "shortest" ? "finish_reason" : by;
    return rows.filter((row) => row[known] !== null).sort((a, b) => sign * (a[by] - b[by]) || b.number - a.number);
  }

  contrasts(rows) {
    const groups = new Map();
    for (const row of this.sorted(rows, "newest").filter((one) => one.reward !== null)) {
      const key = JSON.stringify([row.group_id, row.prompt_id]);
      groups.set(key, [...(groups.get(key) || []), row]);
    }
    return [...groups.values()].flatMap((members) => {
      const ordered = [...members].sort((a, b) => b.reward - a.reward || a.number - b.number), [best, worst] = [ordered[0], ordered.at(-1)];
      return best.reward === worst.reward ? [best] : [best, worst];
    });
  }

  async read(id) {
    if (!this.samples.has(id)) throw new Error(`${oneLine(id)} is not in this file; \`${this.command} ${oneLine(id)}\` shows it`);
    return this.samples.get(id);
  }
}

class ServedTexts {
  list(query) {
    return this.ask("samples.json", query);
  }

  read(id) {
    return this.ask("sample.json", { id });
  }

  async ask(name, query) {
    const answer = await fetch(address(name, query), { cache: "no-store" });
    if (!answer.ok) throw new Error((await answer.text()) || `it answers ${answer.status}`);
    return answer.json();
  }
}

class Texts {
  constructor() {
    this.rows = [];
    this.id = null; // of the one that is open
    this.asked = 0; // questions, so that an answer that comes late is left out
    this.tokens = new TokenText(byId("texts-response"), byId("texts-readout"));
    this.list = byId("texts-list");
    this.list.addEventListener("keydown", (event) => this.key(event));
    byId("texts-colour").onchange = () => this.colour();
    byId("texts-filters").onchange = () => this.refill();
    byId("texts-filters").onsubmit = (event) => event.preventDefault();
    window.addEventListener("hashchange", () => this.follow());
  }

  show(panel) {
    const first = !this.panel;
    this.panel = panel;
    if (first) this.lay(panel.choices);
    if (first || panel.here) this.source = panel.here ? new EmbeddedTexts(panel.here, panel.command) : new ServedTexts();
    if (this.view) this.drawHistory(this.view); // in the colours of now; all else has them by its style
    return this.refill().then(() => this.id === null && (this.wanted ? this.follow() : this.rows.length && this.open(this.rows[0].id, { quietly: true })));
  }

  lay(choices) {
    const labelled = (name, box) => {
      const label = element("label", name);
      label.append(Object.assign(box, { name }));
      return label;
    };
    const reset = Object.assign(element("button", "reset"), { type: "reset", onclick: () => setTimeout(() => this.refill()) });
    byId("texts-filters").replaceChildren(
      ...CHOICES.map((name) => {
        const select = element("select");
        fillSelect(select, [...(name === "order" ? [] : [["", "any"]]), ...choices[name].map((one) => [one, one.replaceAll("_", " ")])]);
        if (name === "order") [...select.options].forEach((one) => (one.defaultSelected = one.value === "newest"));
        return labelled(name, select);
      }),
      ...Object.entries(FIELDS).map(([name, hint]) => labelled(name, Object.assign(element("input"), { placeholder: hint, spellcheck: false, autocomplete: "off" }))),
      reset);
  }

  // ---- the list

  get query() {
    return Object.fromEntries([...new FormData(byId("texts-filters"))].map(([name, value]) => [name, value.trim()]).filter(([, value]) => value));
  }

  async refill() {
    const asked = ++this.asked, note = byId("texts-note");
    try {
      const { rows, matching } = await this.source.list(this.query);
      if (asked !== this.asked) return;
      this.rows = rows;
      this.drawList();
      note.className = "note";
      note.textContent = this.told(rows.length, matching);
    } catch (error) {
      if (asked !== this.asked) return;
      note.className = "note alarm";
      note.textContent = oneLine(error.message);
    }
  }

  told(listed, matching) {
    const { here, total, command } = this.panel, count = (n) => n.toLocaleString("en");
    if (!here) return `${listed < matching ? `The first ${count(listed)} of ${count(matching)}` : `All ${count(matching)}`} trajectories that pass. Arrow keys go through the list.`;
    const chosen = `${count(here.samples.length)} of ${count(total)} trajectories are in this file: the best, worst and longest of the newest steps and evaluations, dropped ones, and their siblings.`;
    const trouble = here.trouble ? ` More cannot be read: ${oneLine(here.trouble)}.` : "";
    return `${chosen}${trouble} \`${command}\` shows any; \`laminar dashboard\` has all of them on this page. ${count(listed)} listed; arrow keys go through the list.`;
  }

  drawList() {
    const rows = this.rows, made = table(
      [["trajectory"], ["prompt"], ["for"], ["step", 1], ["staleness", 1], ["versions", 1], ["reward", 1], ["advantage", 1], ["tokens", 1], ["became"]],
      rows.map((row) => [oneLine(row.id), oneLine(row.prompt_id), this.purpose(row), number(row.step, 12), number(row.staleness), versionsOf(row),
        number(row.reward), number(row.advantage), row.length.toLocaleString("en"), this.fate(row, "")]));
    made.className = "reads";
    this.link(made, rows.map((row) => row.id));
    const top = this.list.scrollTop;
    this.list.replaceChildren(rows.length ? made : element("p", "None passes these filters.", "empty"));
    this.list.scrollTop = top;
    this.mark();
  }

  purpose(row) {
    return row.kind === "eval" ? oneLine(setOf(row)) || "evaluation" : "training";
  }

  fate(row, detail = row.drop_detail) {
    const cut = row.cap ? `, cut by the cap on ${row.cap}` : "", end = row.finish_reason ? `, ended by ${row.finish_reason}${cut}` : "";
    if (row.drop_reason) return `dropped: ${row.drop_reason.replaceAll("_", " ")}${detail ? ` (${oneLine(detail)})` : ""}${end}`;
    return `${row.status}${end}`;
  }

  // Rows of a table that open what they tell of.
  link(made, ids) {
    [...made.tBodies[0].rows].forEach((row, i) => {
      row.dataset.id = ids[i];
      row.onclick = () => this.open(ids[i]);
    });
  }

  // List what these filters alone let pass.
  choose(filters) {
    const form = byId("texts-filters");
    form.reset();
    for (const [name, value] of Object.entries(filters)) form.elements[name].value = value;
    this.refill();
  }

  mark() {
    for (const row of document.querySelectorAll(".reads tbody tr")) row.classList.toggle("chosen", row.dataset.id === this.id);
  }

  key(event) {
    const step = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10, Home: -Infinity, End: Infinity }[event.key];
    if (step === undefined || event.ctrlKey || event.altKey || event.metaKey || !this.rows.length) return;
    event.preventDefault();
    const at = this.rows.findIndex((row) => row.id === this.id), last = this.rows.length - 1;
    const next = at < 0 ? 0 : Math.min(last, Math.max(0, at + step));
    this.open(this.rows[next].id);
    this.bringUp();
  }

  // Scroll the list, and nothing else, to the one that is open.
  bringUp() {
    const row = this.list.querySelector(".chosen"), head = this.list.querySelector("thead");
    if (!row) return;
    const top = row.offsetTop - head.offsetHeight, bottom = row.offsetTop + row.offsetHeight - this.list.clientHeight;
    this.list.scrollTop = Math.max(bottom, Math.min(top, this.list.scrollTop));
  }

  // ---- one of them

  get wanted() {
    return new URLSearchParams(location.hash.slice(1)).get("sample");
  }

  // Open it from elsewhere on the page.
  visit(id) {
    history.replaceState(null, "", `#sample=${encodeURIComponent(id)}`);
    this.follow();
  }

  follow() {
    if (!this.wanted) return;
    this.open(this.wanted, { quietly: true });
    this.bringUp();
    byId("texts").scrollIntoView();
  }

  // Open a trajectory; unless quietly, the address then names it.
  async open(id, { quietly = false } = {}) {
    this.id = id;
    this.mark();
    if (!quietly) history.replaceState(null, "", `#sample=${encodeURIComponent(id)}`);
    try {
      const view = await this.source.read(id);
      if (this.id === id) this.draw(view);
    } catch (error) {
      if (this.id !== id) return;
      this.view = null;
      byId("texts-one").hidden = true;
      byId("texts-note").className = "note alarm";
      byId("texts-note").textContent = oneLine(error.message);
    }
  }

  draw(view) {
    this.view = view;
    const { row } = view;
    byId("texts-one").hidden = false;
    byId("texts-head").replaceChildren(element("b", oneLine(row.id)), element("span", this.facts(view), "note"));
    byId("texts-prompt").replaceChildren(...shown(view.prompt));
    const ids = view.ids_only ? `Tokens are shown as ids: ${oneLine(view.ids_only)}` : "";
    byId("texts-ids").textContent = view.lost ? `No response: ${oneLine(view.lost)}` : ids;
    fillSelect(byId("texts-colour"), [["version", "weight version"], ["logprob", "log-probability"], ...Object.keys(view.columns).map((name) => [name, oneLine(name)]), ["none", "none"]]);
    this.tokens.show(view, byId("texts-colour").value);
    this.drawLegend();
    byId("texts-response").scrollTop = 0;
    byId("texts-answer").replaceChildren(...shown(view.answer || "none is given"));
    this.drawTerms(view);
    this.drawSiblings(view);
    this.drawHistory(view);
    this.mark();
  }

  facts({ row, task }) {
    const parts = [`prompt ${oneLine(row.prompt_id)}${task ? ` of ${oneLine(task)}` : ""}`, row.kind === "eval" ? `evaluation ${oneLine(row.group_id)}` : `group ${oneLine(row.group_id)}`];
    parts.push(`${row.length.toLocaleString("en")} tokens of version ${versionsOf(row)}`, row.reward === null ? "no reward" : `reward ${number(row.reward)}`);
    if (row.advantage !== null) parts.push(`advantage ${number(row.advantage)}`);
    if (row.step !== null) parts.push(`step ${row.step}, staleness ${row.staleness}`);
    return [...parts, this.fate(row)].join(" · ");
  }

  colour() {
    if (!this.view) return;
    this.tokens.colour(byId("texts-colour").value);
    this.drawLegend();
  }

  drawLegend() {
    byId("texts-legend").replaceChildren(...this.tokens.meanings(byId("texts-colour").value).map(([kind, words]) => {
      const one = element("span");
      one.append(element("i", undefined, kind), words);
      return one;
    }));
  }

  drawTerms({ terms }) {
    byId("texts-terms").replaceChildren(...terms.flatMap((term) => {
      const said = term.said ? `, reads the answer as “${oneLine(term.said)}”` : "";
      const head = element("p", `${oneLine(term.name)} ${number(term.value)}${term.elapsed_s ? ` in ${seconds(term.elapsed_s)}` : ""}${said}`);
      if (!term.text) return [head];
      const text = element("pre", undefined, "text said");
      text.append(...shown(term.text));
      return [head, text];
    }), ...(terms.length ? [] : [element("p", "No verifier is on record.", "note")]));
  }

  drawSiblings({ siblings }) {
    const made = table([["sample"], ["reward", 1], ["tokens", 1], ["became"]],
      siblings.map((row) => [oneLine(row.id), number(row.reward), row.length.toLocaleString("en"), row.drop_reason ? row.drop_reason.replaceAll("_", " ") : row.status]));
    made.className = "reads";
    this.link(made, siblings.map((row) => row.id));
    byId("texts-siblings").replaceChildren(made);
  }

  drawHistory({ row, history, visits }) {
    const left = history.length < visits ? `, ${history.length} of them here` : "";
    byId("texts-history-note").textContent = `Prompt ${oneLine(row.prompt_id)} was visited ${visits === 1 ? "once" : `${visits} times`}${left}.`;
    const kinds = [["train", "accent"], ["eval", "second"]].flatMap(([kind, colour]) => {
      const found = history.filter((visit) => visit.kind === kind && visit.version !== null);
      return found.length ? [[kind === "train" ? "training" : "evaluation", css(colour), found]] : [];
    });
    const lines = (of, title, axes) => kinds.map(([name, colour, found]) => ({
      type: "scatter", mode: "lines+markers", name, x: found.map((visit) => visit.version), y: found.map(of), line: { color: colour, width: 1.4 }, marker: { color: colour, size: 5 },
      customdata: found.map((visit) => plain(oneLine(visit.group_id))), hovertemplate: `%{customdata}<br>version %{x}<br>${title} %{y:.4g}<extra>${name}</extra>`, ...axes,
    }));
    const drawn = visits > 1 && kinds.length;
    byId("texts-history").hidden = !drawn;
    if (drawn)
      plot("texts-history", [...lines((visit) => visit.mean_reward, "mean reward", {}), ...lines((visit) => visit.mean_length, "mean length", { yaxis: "y2" })], {
        margin: { l: 44, r: 8, t: 6, b: 36 }, xaxis: axis("weight version", { anchor: "y2" }),
        yaxis: axis("reward", { domain: [0.56, 1], nticks: 4 }), yaxis2: axis("tokens", { domain: [0, 0.44], nticks: 4, rangemode: "tozero" }),
      });
    const newest = [...history].reverse(), made = table([["visit"], ["version", 1], ["step", 1], ["reward", 1], ["solved", 1], ["tokens", 1]],
      newest.map((visit) => [oneLine(visit.group_id), number(visit.version, 12), number(visit.step, 12), number(visit.mean_reward),
        visit.solved === null ? "–" : `${number(visit.solved * 100)} %`, visit.mean_length.toLocaleString("en", { maximumFractionDigits: 1 })]));
    if (!this.panel.here) {
      made.className = "lists";
      [...made.tBodies[0].rows].forEach((one, i) => (one.onclick = () => this.choose({ prompt: row.prompt_id, group: newest[i].group_id })));
    }
    byId("texts-visits").replaceChildren(made);
  }
}

const texts = new Texts();
