// What happened at one position: what the model expected next, and the tokens that did most in every layer.

const SHOWN_TOKENS = 5;
const SHOWN_WORDS = 4;

class PositionView {
  constructor(box, sheet, state) {
    Object.assign(this, { box, sheet, state });
    this.opened = new Set(); // layers of which all kept tokens are shown
  }

  show() {
    const { sheet, state } = this, { at, shown } = state.chosen;
    const { before, here, after } = sheet.around(at, 30, 16);
    const where = make("p.where", {}, make("bdi", {}, before), make("mark", {}, make("bdi", {}, here)), make("bdi", {}, after));
    const layers = sheet.seen.filter((layer) => this.isShown(sheet.layers[layer], shown));
    this.box.replaceChildren(
      make("h2", {}, `${sheet.facts.image ? "Patch" : "Position"} ${count(at + 1)} of ${count(sheet.positions)}`),
      where,
      this.expected(at),
      make("h3", {}, "Tokens that did most here"),
      this.filter(shown),
      ...this.layers(at, layers),
    );
  }

  isShown(layer, shown) {
    return shown === "all" || (shown === "writes" ? layer.writes : layer.title.startsWith("feed-forward")) || !this.hasRoles();
  }

  // Whether the layers have the names that ours have; of other models all layers are shown.
  hasRoles() {
    return this.sheet.layers.some((layer) => layer.title.startsWith("feed-forward"));
  }

  filter(shown) {
    if (!this.hasRoles()) return "";
    const choose = make("select", { "aria-label": "Layers", onchange: () => this.state.set({ shown: choose.value }) });
    for (const [value, text] of [["feed-forward", "feed-forward layers"], ["writes", "layers that write to the result"], ["all", "all layers"]]) {
      choose.append(make("option", { value, selected: value === shown }, text));
    }
    return make("p.filter", {}, make("label", {}, "of the ", choose));
  }

  expected(at) {
    const { sheet } = this, { arrays, facts } = sheet, guesses = sheet.guesses(at), next = at + 1;
    const rows = guesses.map(({ id, share }) => {
      const came = !facts.image && next < sheet.positions && arrays.ids[next] === id;
      return make(came ? "li.came" : "li", {}, chip(sheet.word(id)), bar(share), make("span.number", {}, percent(share)), came && make("span.tag", {}, "came"));
    });
    const title = facts.image ? "The image is taken for" : "The model expects next";
    const part = section(title, make("ol.bars", {}, ...rows));
    if (!facts.image && next < sheet.positions) part.append(this.surprise(next));
    return part;
  }

  surprise(next) {
    const { sheet } = this, bits = sheet.arrays.bits[next];
    return quiet("Next came ", chip(sheet.piece(next)), `, which was given ${percent(2 ** -bits)} (a surprise of ${bits.toFixed(1)} bits).`);
  }

  layers(at, layers) {
    const found = this.sheet.at(at), parts = [];
    for (const layer of layers) {
      const entries = found.get(layer), open = this.opened.has(layer), most = Math.max(1e-9, ...entries.map(({ adds }) => adds));
      const shown = open ? entries : entries.slice(0, SHOWN_TOKENS);
      parts.push(make("section.layer", {},
        make("h4", {}, this.sheet.layerTitle(layer)),
        list("ul.tokens", shown.map((entry) => this.tokenButton(entry, most))),
        entries.length > SHOWN_TOKENS && make("button.more", { type: "button", "aria-expanded": String(open), onclick: () => this.toggle(layer) }, open ? "fewer" : `${entries.length - SHOWN_TOKENS} more`),
      ));
    }
    return parts;
  }

  toggle(layer) {
    if (!this.opened.delete(layer)) this.opened.add(layer);
    this.show();
    [...this.box.querySelectorAll("h4")].find((title) => title.textContent === this.sheet.layerTitle(layer))?.nextSibling.querySelector("button")?.focus();
  }

  tokenButton({ row, weight, adds, effect }, most) {
    const { sheet, state } = this, words = sheet.words(row, weight < 0 ? "suppressed" : "promoted").slice(0, SHOWN_WORDS);
    const chosen = row === state.row, title = sheet.ageTitle(row);
    return make(chosen ? "button.token.chosen" : "button.token", { type: "button", onclick: () => state.chooseToken(row), "aria-pressed": String(chosen), title },
      make(sheet.isNew(row) ? "span.id.new" : "span.id", {}, `#${sheet.token(row)}`),
      bar(adds / most, weight < 0 ? "minus" : ""),
      make("span.words", {}, ...words.map(({ id }) => chip(sheet.word(id)))),
      sheet.writes(row) && make("span.effect", { title: "what it adds to the logit of what comes next" }, signed(effect)),
    );
  }
}
