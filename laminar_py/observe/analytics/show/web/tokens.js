// The text of one response, each token coloured by what is known of it. Text of models is set as text, never as
// markup; what does not print stands as an escape. Neighbours of one colour are one element, so that a response of
// 32 k tokens is drawn at once; which token is under the pointer is found by its place in the text.
"use strict";

const UNSEEN = /[\p{C}\p{Zl}\p{Zp}\p{Zs}]/gu, SHOWN = " \n\t"; // as `records.visible`
const LEVELS = [-0.1, -0.7, -2.3, -4.6]; // log-probabilities, as in the terminal: at least this, or less than all
const VERSION_COLOURS = 6; // in turn, so that neighbours differ
const BREAK = "↵";

// An escape as Python writes it.
function escapeOf(character) {
  const named = { "\r": "\\r", "\n": "\\n", "\t": "\\t" }[character], code = character.codePointAt(0), hex = code.toString(16);
  return named || (code < 0x100 ? `\\x${hex.padStart(2, "0")}` : code < 0x10000 ? `\\u${hex.padStart(4, "0")}` : `\\U${hex.padStart(8, "0")}`);
}

// A text as pieces [text, its class or ""]; with `breaks` a sign stands before each line's end, so that it has a place.
function pieces(text, breaks = false) {
  const found = [];
  let at = 0;
  for (const match of text.matchAll(UNSEEN)) {
    const one = match[0], isBreak = breaks && one === "\n";
    if (!isBreak && SHOWN.includes(one)) continue;
    if (match.index > at) found.push([text.slice(at, match.index), ""]);
    found.push(isBreak ? [BREAK, "break"] : [escapeOf(one), "escape"]);
    at = isBreak ? match.index : match.index + one.length;
  }
  if (at < text.length) found.push([text.slice(at), ""]);
  return found;
}

// Elements that show a text, whatever is in it.
const shown = (text) => pieces(text).map(([piece, kind]) => (kind ? element("span", piece, kind) : piece));
// The same on one line, for a cell or a title.
const oneLine = (text) => String(text).replace(UNSEEN, (one) => (one === " " ? one : escapeOf(one)));

class TokenText {
  constructor(box, readout) {
    this.box = box;
    this.readout = readout;
    this.nodeAt = new Map();
    this.mark = window.Highlight ? new Highlight() : null;
    if (this.mark) CSS.highlights.set("token", this.mark);
    box.addEventListener("pointermove", (event) => this.point(this.tokenAt(event.clientX, event.clientY)));
    box.addEventListener("pointerleave", () => this.point(null));
  }

  // A view as `panels.TextView` has it.
  show(view, mode) {
    this.view = view;
    this.places = unpack(view.places);
    this.logprobs = unpack(view.logprobs);
    this.columns = new Map(Object.entries(view.columns).map(([name, values]) => [name, unpack(values)]));
    const lengths = view.words.map(([, text]) => pieces(text, true).reduce((sum, [piece]) => sum + piece.length, 0));
    this.ends = new Uint32Array(this.places.length); // of the tokens, in characters as shown
    let end = 0;
    this.places.forEach((place, i) => (this.ends[i] = end += lengths[place]));
    this.versions = [...new Set(view.spans.map((span) => span.version))].filter((version) => version !== null);
    this.written = view.spans.filter((span) => span.version === null); // by an environment
    this.colour(mode);
  }

  colour(mode) {
    const found = document.createDocumentFragment(), classes = this.classes(mode), { view } = this;
    this.nodes = [], this.starts = []; // of the text, and where they start, in characters
    this.nodeAt = new Map();
    let at = 0;
    for (let from = 0; from < classes.length; ) {
      let to = from + 1;
      while (to < classes.length && classes[to] === classes[from]) to++;
      const run = element("span", undefined, classes[from]);
      let text = "";
      for (let i = from; i < to; i++) text += view.words[this.places[i]][1];
      for (const [piece, kind] of pieces(text, true)) {
        const node = document.createTextNode(piece);
        this.nodeAt.set(node, this.nodes.length);
        this.nodes.push(node), this.starts.push(at);
        at += piece.length;
        if (kind) run.append(Object.assign(document.createElement("span"), { className: kind })), run.lastChild.append(node);
        else run.append(node);
      }
      found.append(run);
      from = to;
    }
    this.box.replaceChildren(found.childNodes.length ? found : element("span", "nothing yet", "note"));
    this.point(null);
  }

  // [L] class of each token.
  classes(mode) {
    const found = new Array(this.places.length).fill("");
    if (mode === "version") {
      this.view.spans.forEach(({ version, start, end }, i) =>
        version !== null && found.fill(`version-${this.versions.indexOf(version) % VERSION_COLOURS} span-${i % 2}`, start, end));
    } else if (mode === "logprob") {
      this.logprobs.forEach((x, i) => (found[i] = Number.isNaN(x) ? "unknown" : `level-${LEVELS.findIndex((bound) => x >= bound) + 1 || 5}`));
    } else if (this.columns.has(mode)) {
      const bounds = this.bounds(mode);
      this.columns.get(mode).forEach((x, i) => (found[i] = Number.isNaN(x) ? "unknown" : `level-${1 + bounds.findLastIndex((bound) => x >= bound)}`));
    }
    if (mode !== "none") for (const { start, end } of this.written) found.fill("environment", start, end);
    return found;
  }

  // Lower bounds of the five levels of a column; one level where all its numbers are equal.
  bounds(name) {
    const known = this.columns.get(name).filter((x) => !Number.isNaN(x));
    const low = known.reduce((a, b) => Math.min(a, b), Infinity), high = known.reduce((a, b) => Math.max(a, b), -Infinity);
    return high > low ? [0, 1, 2, 3, 4].map((i) => low + ((high - low) * i) / 5) : known.length ? [low] : [];
  }

  // What the colours mean, as [class, words].
  meanings(mode) {
    const written = this.written.length ? [["environment", "environment"]] : [];
    if (mode === "version") return [...this.versions.map((version, i) => [`version-${i % VERSION_COLOURS}`, `version ${version}`]), ...written];
    if (mode === "logprob") return [...LEVELS.map((bound, i) => [`level-${i + 1}`, i ? `from ${bound}` : `log-probability from ${bound}`]), ["level-5", "less"], ["unknown", "not known"], ...written];
    return this.columns.has(mode) ? [...this.bounds(mode).map((bound, i) => [`level-${i + 1}`, `${oneLine(mode)} from ${number(bound)}`]), ...written] : [];
  }

  tokenAt(x, y) {
    const caret = document.caretPositionFromPoint
      ? document.caretPositionFromPoint(x, y)
      : ((range) => range && { offsetNode: range.startContainer, offset: range.startOffset })(document.caretRangeFromPoint(x, y));
    const at = caret ? this.nodeAt.get(caret.offsetNode) : undefined;
    if (at === undefined) return null;
    const length = caret.offsetNode.length; // a caret stands between characters: the one that holds the point counts
    const inside = [caret.offset, caret.offset - 1].find((offset) => offset >= 0 && offset < length && this.rects(caret.offsetNode, offset, offset + 1)
      .some((box) => x >= box.left && x <= box.right && y >= box.top && y <= box.bottom));
    return inside === undefined ? null : firstAtLeast(this.ends, this.starts[at] + inside + 1);
  }

  rects(node, from, to) {
    const range = document.createRange();
    range.setStart(node, from), range.setEnd(node, to);
    return [...range.getClientRects()];
  }

  // Tell a token; one before it whose bytes only begin a character has no place of its own, and is told with it.
  point(token) {
    this.mark?.clear();
    if (token === null) {
      this.readout.textContent = "Point at a token for its id, log-probability, version and replica.";
      return;
    }
    let first = token;
    while (first > 0 && this.ends[first - 1] === (token > 1 && first > 1 ? this.ends[first - 2] : 0)) first--;
    const many = first < token, all = (tell) => Array.from({ length: token - first + 1 }, (_, i) => tell(first + i)).join(", ");
    const span = this.view.spans.find(({ start, end }) => start <= token && token < end);
    const logprobs = all((i) => (Number.isNaN(this.logprobs[i]) ? "not known" : this.logprobs[i].toFixed(4).replace(/^-(0\.0+)$/, "$1")));
    const parts = [
      `${many ? `tokens ${first} to ${token}` : `token ${token}`} of ${this.places.length.toLocaleString("en")}`,
      `“${oneLine(this.view.words[this.places[token]][1])}”`,
      `id ${all((i) => this.view.words[this.places[i]][0])}`,
    ];
    const isWritten = span && span.version === null;
    parts.push(isWritten ? "the environment wrote it, and nothing is learned of it" : `log-probability ${logprobs}`);
    if (!many && !isWritten && !Number.isNaN(this.logprobs[token])) parts.push(`probability ${number(Math.exp(this.logprobs[token]))}`);
    if (span && !isWritten) parts.push(`version ${span.version}`, span.replica === null ? "replica not on record" : `replica ${span.replica}`);
    if (span && span.kv_version !== null) parts.push(`on a KV cache from version ${span.kv_version} on`);
    for (const [name, values] of this.columns) parts.push(`${oneLine(name)} ${number(values[token])}`);
    this.readout.textContent = parts.join(" · ");
    this.outline(first === 0 ? 0 : this.ends[first - 1], this.ends[token]);
  }

  // Mark characters [from, to), which may lie in several text nodes.
  outline(from, to) {
    if (!this.mark) return;
    const first = Math.max(0, firstAtLeast(this.starts, from + 1) - 1);
    for (let i = first; i < this.nodes.length && this.starts[i] < to; i++) {
      const node = this.nodes[i], [a, b] = [Math.max(0, from - this.starts[i]), Math.min(node.length, to - this.starts[i])];
      if (a >= b) continue;
      const range = document.createRange();
      range.setStart(node, a), range.setEnd(node, b);
      this.mark.add(range);
    }
  }
}
