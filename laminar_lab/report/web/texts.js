// The panel of texts: a list, and one response with everything beside it. A report holds some texts and searches
// them; a dashboard queries its server. Text of models, data and verifiers is set as text, never as markup.

const CHOICES = ["order", "kind", "status", "reason"];
const FIELDS = { // filters of the server, each with an example
  prompt: "p17", group: "g17", set: "heldout", step: ">3", reward: "0", length: ">100", staleness: ">2", version: "3", replica: "0",
};
const LEVELS = [-0.1, -0.7, -2.3, -4.6]; // log-probabilities, as in the terminal: at least this, or less than all
const VERSION_COLOURS = 6; // in turn, so that neighbours differ
const HEAD = ["trajectory", "prompt", "for", "step", "staleness", "versions", "reward", "advantage", "tokens", "became"];

const count = (n) => n.toLocaleString("en");
const setOf = (row) => (row.kind === "eval" ? row.group_id.slice(row.group_id.indexOf("-") + 1) : null);
const versionsOf = (row) => row.oldest_version === null ? "–" : row.oldest_version === row.newest_version ? String(row.oldest_version) : `${row.oldest_version} to ${row.newest_version}`;

function fateOf(row, detail = row.drop_detail) {
  const cut = row.cap ? `, cut by the cap on ${row.cap}` : "", end = row.finish_reason ? `, ended by ${row.finish_reason}${cut}` : "";
  return row.drop_reason ? `dropped: ${row.drop_reason.replaceAll("_", " ")}${detail ? ` (${oneLine(detail)})` : ""}${end}` : `${row.status}${end}`;
}

const cellsOf = (row) => [row.id, row.prompt_id, row.kind === "eval" ? setOf(row) || "evaluation" : "training", number(row.step, 12),
  number(row.staleness), versionsOf(row), number(row.reward), number(row.advantage), count(row.length), fateOf(row, "")];

// A source has `list(query)`, which gives rows and their number, and `read(id)`.
function embeddedTexts({ samples }, command) {
  const found = new Map(samples.map((one) => [one.row.id, one]));
  const rows = [...found.values()].map((one) => one.row).sort((a, b) => b.number - a.number);
  return {
    list: async ({ find = "" }) => {
      const passing = rows.filter((row) => cellsOf(row).some((cell) => cell.includes(find)));
      return { rows: passing, matching: passing.length };
    },
    read: async (id) => {
      if (!found.has(id)) throw new Error(`${oneLine(id)} is not in this file; \`${command} ${oneLine(id)}\` shows it`);
      return found.get(id);
    },
  };
}

function servedTexts() {
  const query = async (name, values) => {
    const answer = await fetch(address(name, values), { cache: "no-store" });
    if (!answer.ok) throw new Error((await answer.text()) || `it answers ${answer.status}`);
    return answer.json();
  };
  return { list: (values) => query("samples.json", values), read: (id) => query("sample.json", { id }) };
}

// A text as nodes, whatever is in it.
function shown(text) {
  const found = [];
  let at = 0;
  for (const { 0: one, index } of text.matchAll(UNSEEN)) {
    if (" \n\t".includes(one)) continue;
    found.push(text.slice(at, index), element("span", escapeOf(one), "escape"));
    at = index + one.length;
  }
  return [...found, text.slice(at)];
}

function preOf(text) {
  const made = element("pre", undefined, "text");
  made.append(...shown(text));
  return made;
}

class Texts {
  constructor() {
    this.rows = [];
    this.id = null; // of the one that is open
    this.asked = 0; // questions, so that an answer that comes late is left out
    this.list = byId("texts-list");
    this.list.addEventListener("keydown", (event) => this.key(event));
    byId("texts-colour").onchange = () => this.view && this.colour();
    byId("texts-filters").onchange = () => this.refill();
    byId("texts-filters").onsubmit = (event) => event.preventDefault();
    byId("texts-response").addEventListener("pointermove", ({ target }) => this.point(Number(target.closest("[data-at]")?.dataset.at ?? NaN)));
    window.addEventListener("hashchange", () => this.follow());
  }

  show(panel) {
    const first = !this.panel;
    this.panel = panel;
    if (first) this.lay(panel.choices);
    if (first || panel.here) this.source = panel.here ? embeddedTexts(panel.here, panel.command) : servedTexts();
    if (this.view) this.drawHistory(this.view); // in the colours of now; all else has them by its style
    return this.refill().then(() => this.id === null && (this.wanted ? this.follow() : this.rows.length && this.open(this.rows[0].id, { quietly: true })));
  }

  lay(choices) {
    const labelled = (name, box) => {
      const label = element("label", name);
      label.append(Object.assign(box, { name }));
      return label;
    };
    const input = (name, hint) => labelled(name, Object.assign(element("input"), { placeholder: hint, spellcheck: false, autocomplete: "off" }));
    if (this.panel.here) return byId("texts-filters").replaceChildren(input("find", "any column"));
    byId("texts-filters").replaceChildren(
      ...CHOICES.map((name) => {
        const select = element("select");
        fillSelect(select, [...(name === "order" ? [] : [["", "any"]]), ...choices[name].map((one) => [one, one.replaceAll("_", " ")])]);
        if (name === "order") [...select.options].forEach((one) => (one.defaultSelected = one.value === "newest"));
        return labelled(name, select);
      }),
      ...Object.entries(FIELDS).map(([name, hint]) => input(name, hint)),
      Object.assign(element("button", "reset"), { type: "reset", onclick: () => setTimeout(() => this.refill()) }));
  }

  // ---- the list

  note(text, alarm = false) {
    Object.assign(byId("texts-note"), { textContent: text, className: alarm ? "note alarm" : "note" });
  }

  async refill() {
    const asked = ++this.asked, fields = [...new FormData(byId("texts-filters"))].map(([name, value]) => [name, value.trim()]);
    try {
      const { rows, matching } = await this.source.list(Object.fromEntries(fields.filter(([, value]) => value)));
      if (asked !== this.asked) return;
      this.rows = rows;
      this.drawList();
      this.note(this.describe(rows.length, matching));
    } catch (error) {
      if (asked === this.asked) this.note(oneLine(error.message), true);
    }
  }

  describe(listed, matching) {
    const { here, total, command } = this.panel;
    if (!here) return `${listed < matching ? `The first ${count(listed)} of ${count(matching)}` : `All ${count(matching)}`} trajectories that pass. Arrow keys go through the list.`;
    const chosen = `${count(here.samples.length)} of ${count(total)} trajectories are in this file: the best, worst and longest of the newest steps and evaluations, dropped ones, and their siblings.`;
    const trouble = here.trouble ? ` More cannot be read: ${oneLine(here.trouble)}.` : "";
    return `${chosen}${trouble} \`${command}\` shows any; \`laminar dashboard\` has all of them on this page. ${count(listed)} listed; arrow keys go through the list.`;
  }

  drawList() {
    const rows = this.rows.map(cellsOf), top = this.list.scrollTop;
    this.list.replaceChildren(rows.length ? table({ head: HEAD, rows, words: 1 }, (id) => this.open(id)) : element("p", "None passes these filters.", "empty"));
    this.list.scrollTop = top;
    this.mark();
  }

  mark() {
    for (const row of byId("texts").querySelectorAll(".opens tbody tr")) row.classList.toggle("chosen", row.dataset.id === this.id);
  }

  key(event) {
    const step = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10, Home: -Infinity, End: Infinity }[event.key];
    if (step === undefined || event.ctrlKey || event.altKey || event.metaKey || !this.rows.length) return;
    event.preventDefault();
    const at = this.rows.findIndex((row) => row.id === this.id);
    this.open(this.rows[at < 0 ? 0 : Math.min(this.rows.length - 1, Math.max(0, at + step))].id);
    this.list.querySelector(".chosen")?.scrollIntoView({ block: "nearest" });
  }

  // ---- one of them

  get wanted() {
    return new URLSearchParams(location.hash.slice(1)).get("sample");
  }

  follow() {
    if (!this.wanted) return;
    this.open(this.wanted, { quietly: true });
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
      this.note(oneLine(error.message), true);
    }
  }

  draw(view) {
    this.view = { ...view, columns: new Map(Object.entries(view.columns)) };
    this.versions = [...new Set(view.spans.map((span) => span.version))].filter((version) => version !== null);
    byId("texts-one").hidden = false;
    byId("texts-head").replaceChildren(element("b", oneLine(view.row.id)), element("span", this.facts(view), "note"));
    byId("texts-prompt").replaceChildren(...shown(view.prompt));
    byId("texts-ids").textContent = view.lost ? `No response: ${oneLine(view.lost)}` : view.ids_only ? `Tokens are shown as ids: ${oneLine(view.ids_only)}` : "";
    fillSelect(byId("texts-colour"), [["version", "weight version"], ["logprob", "log-probability"], ...Object.keys(view.columns).map((name) => [name, oneLine(name)]), ["none", "none"]]);
    this.colour();
    byId("texts-response").scrollTop = 0;
    byId("texts-aside").replaceChildren(element("h3", "Answer"), preOf(view.answer || "none is given"), element("h3", "Reward"), ...this.terms(view),
      element("h3", "Its group"), this.siblings(view), element("h3", "The prompt over training"), element("p", undefined, "note"), element("div", undefined, "chart"), this.visits(view));
    this.drawHistory(view);
    this.mark();
  }

  facts({ row, task }) {
    const parts = [`prompt ${oneLine(row.prompt_id)}${task ? ` of ${oneLine(task)}` : ""}`, `${row.kind === "eval" ? "evaluation" : "group"} ${oneLine(row.group_id)}`];
    parts.push(`${count(row.length)} tokens of version ${versionsOf(row)}`, row.reward === null ? "no reward" : `reward ${number(row.reward)}`);
    if (row.advantage !== null) parts.push(`advantage ${number(row.advantage)}`);
    if (row.step !== null) parts.push(`step ${row.step}, staleness ${row.staleness}`);
    return [...parts, fateOf(row)].join(" · ");
  }

  terms({ terms }) {
    return terms.length ? terms.flatMap((term) => {
      const said = term.said ? `, reads the answer as “${oneLine(term.said)}”` : "";
      const head = element("p", `${oneLine(term.name)} ${number(term.value)}${term.elapsed_s ? ` in ${seconds(term.elapsed_s)}` : ""}${said}`, "note");
      return term.text ? [head, preOf(term.text)] : [head];
    }) : [element("p", "No verifier is on record.", "note")];
  }

  siblings({ siblings }) {
    const rows = siblings.map((row) => [row.id, number(row.reward), count(row.length), row.drop_reason ? row.drop_reason.replaceAll("_", " ") : row.status]);
    return Object.assign(table({ head: ["sample", "reward", "tokens", "became"], rows, words: 1 }, (id) => this.open(id)), { id: "texts-siblings" });
  }

  // A click on a visit lists its trajectories, where the server has them.
  visits({ row, history }) {
    const rows = [...history].reverse().map((visit) => [visit.group_id, number(visit.version, 12), number(visit.step, 12), number(visit.mean_reward),
      visit.solved === null ? "–" : `${number(visit.solved * 100)} %`, visit.mean_length.toLocaleString("en", { maximumFractionDigits: 1 })]);
    const choose = (group) => {
      const form = byId("texts-filters");
      form.reset();
      for (const [name, value] of [["prompt", row.prompt_id], ["group", group]]) form.elements[name].value = value;
      this.refill();
    };
    return Object.assign(table({ head: ["visit", "version", "step", "reward", "solved", "tokens"], rows }, this.panel.here ? undefined : choose), { id: "texts-visits" });
  }

  drawHistory({ row, history }) {
    const [note, box] = byId("texts-aside").querySelectorAll(":scope > .note:has(+ .chart), :scope > .chart"), visits = history.length;
    note.textContent = `Prompt ${oneLine(row.prompt_id)} ${visits === 1 ? "has one visit" : `has ${visits} visits here`}.`;
    const kinds = [["train", "training", "accent"], ["eval", "evaluation", "second"]].map(([kind, name, colour]) => [name, colour, history.filter((one) => one.kind === kind && one.version !== null)]);
    const series = kinds.filter(([, , found]) => found.length).map(([name, colour, found]) => ({ name, colour, x: found.map((one) => one.version), y: found.map((one) => one.mean_reward), words: found.map((one) => `${oneLine(one.group_id)}: reward ${number(one.mean_reward)}, ${number(one.mean_length)} tokens`) }));
    box.hidden = visits < 2 || !series.length;
    if (!box.hidden) drawChart(box, { x: "weight version", y: "mean reward", series });
  }

  // ---- tokens

  // Lower bounds of the five levels of a column; one level where all its numbers are equal.
  bounds(name) {
    const known = this.view.columns.get(name).filter((x) => x !== null);
    const low = known.reduce((a, b) => Math.min(a, b), Infinity), high = known.reduce((a, b) => Math.max(a, b), -Infinity);
    return high > low ? [0, 1, 2, 3, 4].map((i) => low + ((high - low) * i) / 5) : known.length ? [low] : [];
  }

  // Draw the response: [L] classes of its tokens by what the colour shows, and what these mean.
  colour() {
    const mode = byId("texts-colour").value, { spans, tokens, logprobs, columns } = this.view, classes = new Array(tokens.length).fill("");
    const meanings = [], level = (values, of) => values.forEach((x, i) => (classes[i] = x === null ? "unknown" : `level-${of(x)}`));
    if (mode === "version") {
      for (const { version, start, end } of spans) if (version !== null) classes.fill(`version-${this.versions.indexOf(version) % VERSION_COLOURS}`, start, end);
      meanings.push(...this.versions.map((version, i) => [`version-${i % VERSION_COLOURS}`, `version ${version}`]));
    } else if (mode === "logprob") {
      level(logprobs, (x) => LEVELS.findIndex((bound) => x >= bound) + 1 || 5);
      meanings.push(...LEVELS.map((bound, i) => [`level-${i + 1}`, i ? `from ${bound}` : `log-probability from ${bound}`]), ["level-5", "less"], ["unknown", "not known"]);
    } else if (columns.has(mode)) {
      const bounds = this.bounds(mode);
      level(columns.get(mode), (x) => 1 + bounds.findLastIndex((bound) => x >= bound));
      meanings.push(...bounds.map((bound, i) => [`level-${i + 1}`, `${oneLine(mode)} from ${number(bound)}`]));
    }
    const written = mode === "none" ? [] : spans.filter((span) => span.version === null); // by an environment
    for (const { start, end } of written) classes.fill("environment", start, end);
    if (written.length) meanings.push(["environment", "environment"]);
    const found = document.createDocumentFragment();
    tokens.forEach((text, i) => {
      const token = element("span", undefined, classes[i]);
      token.dataset.at = i;
      token.append(...shown(text));
      found.append(token);
    });
    byId("texts-response").replaceChildren(tokens.length ? found : element("span", "nothing yet", "note"));
    byId("texts-legend").replaceChildren(...meanings.map(([kind, text]) => {
      const one = element("span");
      one.append(element("i", undefined, kind), text);
      return one;
    }));
    this.point(NaN);
  }

  // Tell a token; one before it whose bytes only begin a character has no place of its own, and is told with it.
  point(token) {
    const { spans, tokens, ids, logprobs, columns } = this.view, readout = byId("texts-readout");
    if (Number.isNaN(token)) return void (readout.textContent = "Point at a token for its id, log-probability, version and replica.");
    let first = token;
    while (first > 0 && tokens[first - 1] === "") first--;
    const all = (tell) => Array.from({ length: token - first + 1 }, (_, i) => tell(first + i)).join(", "), span = spans.find(({ start, end }) => start <= token && token < end);
    const logprob = (i) => (logprobs[i] === null ? "not known" : logprobs[i].toFixed(4).replace(/^-(0\.0+)$/, "$1"));
    const parts = [`${first < token ? `tokens ${first} to ${token}` : `token ${token}`} of ${count(tokens.length)}`, `“${oneLine(tokens[token])}”`, `id ${all((i) => ids[i])}`];
    if (span?.version === null) parts.push("the environment wrote it, and nothing is learned of it");
    else parts.push(`log-probability ${all(logprob)}`);
    if (span && span.version !== null) parts.push(`version ${span.version}`, span.replica === null ? "replica not on record" : `replica ${span.replica}`);
    if (span && span.kv_version !== null) parts.push(`on a KV cache from version ${span.kv_version} on`);
    for (const [name, values] of columns) parts.push(`${oneLine(name)} ${number(values[token])}`);
    readout.textContent = parts.join(" · ");
  }
}

const texts = new Texts();
