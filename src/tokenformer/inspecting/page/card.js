// The card of one token: where it fires, which words it makes likelier, what is like it, where it came from.

const CARD_PLACES = 8;

class CardView {
  constructor(box, sheet, state, live) {
    Object.assign(this, { box, sheet, state, live });
  }

  show() {
    const { sheet, state } = this, { row, chosen } = state;
    if (chosen.layer === null) {
      this.box.replaceChildren(make("h2", {}, "No token is chosen"), quiet("Choose a position in the text, and one of the tokens that did something there. Its card says where else it fires, and what it makes likelier."));
    } else if (row < 0) {
      this.box.replaceChildren(make("h2", {}, `#${chosen.token} in ${sheet.layerTitle(chosen.layer)}`), quiet("It is nowhere in this text among the strongest of its layer, so this page has no card of it."), this.switches(chosen.layer, chosen.token));
    } else this.box.replaceChildren(...this.card(row));
  }

  card(row) {
    const { sheet } = this, layer = sheet.layerOf[row];
    return [
      make("h2", {}, `#${sheet.token(row)}`, make("small", {}, ` ${sheet.layerTitle(layer)}`)),
      this.facts(row),
      this.switches(layer, sheet.token(row)),
      this.places(row),
      ...this.wordParts(row),
      this.indexed(row),
      this.neighbours(row),
      this.stages(row),
    ].filter(Boolean);
  }

  facts(row) {
    const { arrays, facts } = this.sheet, found = [];
    const age = this.sheet.ageTitle(row);
    if (age) found.push(make(this.sheet.isNew(row) ? "span.tag.new" : "span.tag", {}, age));
    found.push(`Does more here than ${percent(arrays.use_ranks[row] / 255)} of the tokens of its layer`);
    const told = arrays.selectivity[row] / Math.LN2;
    if (!facts.image) found.push(`Its firing tells ${told.toFixed(1)} bits of the ${facts.unit} that is read: it is ${told > 2 ? "choosy" : told > 1 ? "fairly choosy" : "not choosy"}`);
    if (this.sheet.writes(row) && !facts.image) found.push(`Adds ${signed(arrays.helps[row])} to the logit of what comes next, on average`);
    return list("ul.facts", found);
  }

  places(row) {
    const { sheet, state } = this, best = sheet.best(row, CARD_PLACES);
    const places = best.map(({ position, weight }) =>
      placeButton(sheet, position, (at) => state.set({ at }), make("span.weight", {}, bar(Math.abs(weight) / sheet.arrays.largest[row], weight < 0 ? "minus" : ""), make("span.number", {}, weight.toFixed(1)))));
    return section("Fires most at", quiet("The number is its weight: how much of its value is added. ", make("mark", {}, "Marked"), " is where it fires."), list("ul.places", places));
  }

  wordParts(row) {
    const { sheet } = this;
    if (!sheet.writes(row)) return [section("Words", quiet("What this layer adds is used inside attention. It does not reach the result directly, so it points to no words."))];
    const words = (which) => make("p.chips", {}, ...sheet.words(row, which).map(({ id, logit, share }) => {
      const found = chip(sheet.word(id), `${signed(logit)} for the logit, at a weight of 1, before the final norm`, which === "promoted" ? "plus" : "minus");
      found.style.setProperty("--share", share);
      return found;
    }));
    const what = sheet.facts.image ? "classes" : "words";
    return [section(`Makes these ${what} likelier`, words("promoted")), section("Makes these less likely", words("suppressed"))];
  }

  // Contexts from the index of a larger text, if the page was made with one.
  indexed(row) {
    const { sheet } = this, texts = sheet.facts.index?.[row];
    if (!texts?.length) return null;
    const contexts = texts.map(([before, here, after]) => make("span.context", {}, make("bdi", {}, before), make("mark", {}, make("bdi", {}, here)), make("bdi", {}, after)));
    return section("In the text of the index", list("ul.places.still", contexts));
  }

  neighbours(row) {
    const { sheet, state } = this, layer = sheet.layerOf[row];
    const found = sheet.neighbours(row).map(({ token, cosine }) => {
      const near = sheet.find(layer, token), text = `#${token} ${percent(Math.max(0, cosine))}`;
      return near < 0 ? make("span.chip", { title: "not among the strongest anywhere in this text" }, text)
        : make("button.chip", { type: "button", onclick: () => state.chooseToken(near) }, text);
    });
    return found.length ? section("Adds almost the same", quiet("Tokens of the layer whose values point the same way (cosine)."), make("p.chips", {}, ...found)) : null;
  }

  stages(row) {
    const { sheet } = this, names = [...sheet.facts.stages, "now"], use = sheet.useByStage(row);
    if (names.length < 2) return null;
    const most = Math.max(1, ...use), age = sheet.age(row);
    const bars = names.map((name, i) => make("li", {}, make("span.name", {}, name), bar(use[i] / most), make("span.number", {}, use[i] ? `${use[i].toFixed(1)} ×` : age > 0 ? "not there" : "–")));
    return section("Use while the model was trained", quiet("How much it adds in this text, against the mean token of its layer in that stage."), make("ol.bars.wide", {}, ...bars));
  }

  switches(layer, token) {
    return this.live ? this.live.tokenSwitch(layer, token) : "";
  }
}
