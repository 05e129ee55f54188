// Search: tokens by number, by the words they make likelier, or in an order; and places in the text.

const FOUND = 40;
const ORDERS = {
  use: ["do most in this text", (sheet, row) => sheet.arrays.use[row] / sheet.meanUse[sheet.layerOf[row]]],
  choosy: ["are choosiest", (sheet, row) => sheet.arrays.selectivity[row]],
  helps: ["help most with what comes next", (sheet, row) => sheet.arrays.helps[row]],
  harms: ["hinder most", (sheet, row) => -sheet.arrays.helps[row]],
  newest: ["are newest", (sheet, row) => sheet.age(row) + sheet.arrays.use_ranks[row] / 256],
};

class FindView {
  constructor(box, sheet, state) {
    Object.assign(this, { box, sheet, state });
    sheet.meanUse = sheet.layers.map((_, layer) => {
      const use = sheet.arrays.use.subarray(sheet.firstRow[layer], sheet.firstRow[layer + 1]);
      return use.reduce((sum, one) => sum + one, 0) / Math.max(1, use.length) || 1;
    });
    this.order = make("select", { onchange: () => this.results() }, ...Object.entries(ORDERS).map(([value, [text]]) => make("option", { value }, text)));
    this.layer = make("select", { onchange: () => this.results() }, make("option", { value: "" }, "all layers"),
      ...sheet.seen.map((layer) => make("option", { value: layer }, sheet.layerTitle(layer))));
    this.input = make("input", { type: "search", placeholder: "a word, or a token's number", maxlength: 100, autocomplete: "off", spellcheck: "false", oninput: () => this.results() });
    this.found = make("div", { "aria-live": "polite" });
    box.replaceChildren(
      make("h2", {}, "Find"),
      make("label.search", {}, make("span", {}, "Search for"), this.input),
      make("p.filter", {}, make("label", {}, "tokens that ", this.order), make("label", {}, "in ", this.layer)),
      this.found,
    );
    this.results();
  }

  show() {}

  focus() {
    this.input.focus();
  }

  results() {
    const asked = this.input.value;
    this.found.replaceChildren(...(asked.trim() ? this.matches(asked) : this.ordered()));
  }

  rows() {
    const { sheet } = this, layer = this.layer.value;
    const [first, end] = layer === "" ? [0, sheet.rows] : [sheet.firstRow[layer], sheet.firstRow[Number(layer) + 1]];
    return Array.from({ length: end - first }, (_, i) => first + i);
  }

  ordered() {
    const { sheet } = this, score = ORDERS[this.order.value][1], inOrder = ["helps", "harms"].includes(this.order.value);
    const rows = this.rows().filter((row) => !inOrder || sheet.writes(row)).map((row) => [score(sheet, row), row]);
    rows.sort((a, b) => b[0] - a[0]);
    return [this.tokens(rows.slice(0, FOUND).map(([, row]) => row))];
  }

  matches(asked) {
    const { sheet } = this, number = /^#?(\d+)$/.exec(asked.trim()), parts = [];
    const rows = this.rows();
    if (number) parts.push(this.part("Tokens of this number", this.tokens(rows.filter((row) => sheet.token(row) === Number(number[1])).slice(0, FOUND))));
    const wanted = asked.trim().toLowerCase();
    const words = new Set(Object.keys(sheet.facts.words).filter((id) => sheet.word(id).toLowerCase() === wanted).map(Number));
    if (!words.size) for (const id of Object.keys(sheet.facts.words)) if (sheet.word(id).toLowerCase().includes(wanted)) words.add(Number(id));
    const pointing = rows.flatMap((row) => {
      const word = sheet.words(row, "promoted").find(({ id }) => words.has(id));
      return word ? [[word.share * sheet.arrays.use[row], row]] : [];
    });
    pointing.sort((a, b) => b[0] - a[0]);
    parts.push(this.part("Tokens that make it likelier", this.tokens(pointing.slice(0, FOUND).map(([, row]) => row))));
    if (!sheet.facts.image) parts.push(this.part("Places in the text", list("ul.places", this.places(asked).map((at) => placeButton(sheet, at, (to) => this.state.choosePosition(to))))));
    return parts;
  }

  part(title, found) {
    return section(title, found.children.length ? found : quiet("None."));
  }

  // Where the text has what was asked, which may reach over several pieces.
  places(asked) {
    const { sheet } = this, starts = [], found = [];
    let text = "";
    for (const piece of sheet.facts.pieces) {
      starts.push(text.length);
      text += piece;
    }
    text = text.toLowerCase();
    for (let at = text.indexOf(asked.toLowerCase()); at >= 0 && found.length < FOUND; at = text.indexOf(asked.toLowerCase(), at + 1)) {
      let position = starts.findLastIndex((start) => start <= at);
      while (sheet.facts.pieces[position] === "" && position > 0) position--;
      found.push(position);
    }
    return found;
  }

  tokens(rows) {
    return list("ul.cards", rows.map((row) => tokenLine(this.sheet, this.state, row)));
  }
}

// A token in a list: its number and layer, its words, and where it fires most.
function tokenLine(sheet, state, row) {
  const [best] = sheet.best(row, 1), { before, here, after } = sheet.around(best.position, 18, 8);
  return make("button.line", { type: "button", onclick: () => state.chooseToken(row) },
    make("span.head", {}, make(sheet.isNew(row) ? "span.id.new" : "span.id", {}, `#${sheet.token(row)}`), make("span.quiet", {}, sheet.layerTitle(sheet.layerOf[row])), ...sheet.words(row, "promoted").slice(0, 5).map(({ id }) => chip(sheet.word(id)))),
    make("span.context", {}, make("bdi", {}, before), make("mark", {}, make("bdi", {}, here)), make("bdi", {}, after)),
  );
}
