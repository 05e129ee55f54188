// The text, piece by piece, or the patches of an image; coloured, and walked through with a pointer or arrow keys.

const LEVELS = 8;
const BITS = 8; // of surprise, from which on the colour is full

class TextView {
  constructor(box, sheet, state) {
    Object.assign(this, { box, sheet, state });
    this.image = sheet.facts.image;
    this.change = null; // bits by which switches changed the surprise, by position
    this.exact = null; // { layer, token, weights }: all weights of the chosen token, from the server
    this.spans = sheet.facts.pieces.map((piece, i) => this.span(piece, i));
    box.classList.toggle("image", Boolean(this.image));
    box.replaceChildren(...(this.image ? this.patches() : this.spans));
    this.levels = new Int8Array(this.spans.length);
    box.onclick = (event) => this.click(event);
    box.onkeydown = (event) => this.key(event);
  }

  span(piece, position) {
    const span = make(piece ? "span" : "span.rest", { "data-at": position });
    if (this.image) span.title = piece;
    else if (piece.endsWith("\n")) span.append(make("i", {}, piece.slice(0, -1)), "\n");
    else if (piece.startsWith("⟨") || piece.startsWith("⇥")) span.append(make("i", {}, piece));
    else span.textContent = piece || "·";
    if (!piece) span.title = "a later byte of the character before it";
    return span;
  }

  // The class token, if there is one, above the grid.
  patches() {
    const { url, rows, columns, extra } = this.image;
    const grid = make("div.grid", { "--columns": columns, "--rows": rows }, make("img", { src: url, alt: this.sheet.facts.of }), ...this.spans.slice(extra));
    for (const span of this.spans.slice(0, extra)) {
      span.className = "extra";
      span.textContent = span.title;
    }
    return [...this.spans.slice(0, extra), grid];
  }

  click(event) {
    const span = event.target.closest("[data-at]");
    if (span) this.state.choosePosition(Number(span.dataset.at));
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { at } = this.state.chosen, last = this.spans.length - 1;
    const to = { ArrowRight: () => at + 1, ArrowLeft: () => at - 1, Home: () => 0, End: () => last, ArrowDown: () => this.line(at, 1), ArrowUp: () => this.line(at, -1) }[event.key];
    if (!to) return;
    event.preventDefault();
    this.state.choosePosition(to());
  }

  // The position one line further down or up that is nearest to the same column.
  line(at, step) {
    const extra = this.image?.extra ?? 0;
    if (this.image) return at < extra ? at + step : at + step * this.image.columns;
    const from = this.spans[at].getBoundingClientRect();
    let found = at, line = null;
    for (let i = at + step; i >= 0 && i < this.spans.length; i += step) {
      const { top, left } = this.spans[i].getBoundingClientRect();
      if (Math.abs(top - from.top) < from.height / 2) continue;
      line ??= top;
      if (Math.abs(top - line) > from.height / 2) break;
      found = i;
      if (step > 0 ? left >= from.left : left <= from.left) break;
    }
    return found;
  }

  // What each position is coloured by: -1 to 1.
  values(colour) {
    const { sheet } = this, { arrays, facts } = sheet, found = new Float32Array(this.spans.length);
    const { row, chosen } = this.state;
    if (colour === "surprise" && arrays.bits.length) arrays.bits.forEach((bits, i) => (found[i] = (bits || 0) / BITS));
    if (colour === "growth" && arrays.before_bits) {
      arrays.before_bits.forEach((bits, i) => (found[i] = ((bits || 0) - (arrays.bits[i] || 0)) / (BITS / 4)));
    }
    if (colour === "new") for (let i = 0; i < found.length; i++) found[i] = sheet.newShare(i);
    if (colour === "change" && this.change) this.change.forEach((bits, i) => (found[i] = -bits / (BITS / 4)));
    if (colour === "token") {
      const exact = this.exact && this.exact.layer === chosen.layer && this.exact.token === chosen.token;
      if (exact) {
        const largest = this.exact.weights.reduce((most, weight) => Math.max(most, Math.abs(weight)), 1e-9);
        this.exact.weights.forEach((weight, i) => (found[i] = weight / largest));
      } else if (row >= 0) {
        for (const { position, weight } of sheet.of(row)) found[position] = weight / arrays.largest[row];
      }
    }
    return facts.image && colour === "surprise" ? this.activity(found) : found;
  }

  // Of an image: how much all layers add at a patch.
  activity(found) {
    for (let i = 0; i < found.length; i++) {
      for (const entries of this.sheet.at(i).values()) for (const { adds } of entries) found[i] += adds;
    }
    const most = Math.max(...found, 1e-9);
    return found.map((value) => value / most);
  }

  colour(colour) {
    this.values(colour).forEach((value, i) => {
      const level = Math.sign(value) * Math.min(LEVELS, Math.round(Math.abs(value) * LEVELS));
      if (level === this.levels[i]) return;
      this.levels[i] = level;
      if (level) this.spans[i].dataset.level = level;
      else delete this.spans[i].dataset.level;
    });
  }

  mark(at) {
    this.box.querySelector("#here")?.removeAttribute("id");
    const span = this.spans[at];
    span.id = "here";
    const box = this.box.getBoundingClientRect(), here = span.getBoundingClientRect();
    if (here.top < box.top || here.bottom > box.bottom) {
      this.box.scrollTop += here.top - box.top - box.height / 3;
    }
  }
}
