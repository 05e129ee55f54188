// Growth: the same text before and after, old and new tokens apart, and what the new ones came to do.

const NEW_SHOWN = 12;
const PLACES_SHOWN = 10;

class GrowthView {
  constructor(box, sheet, state) {
    Object.assign(this, { box, sheet, state });
    const { growth, new_after: after } = sheet.facts, steps = growth.slice(after);
    if (!steps.length) {
      box.replaceChildren(make("h2", {}, "Growth"), quiet("This model has not grown, or nothing is known of it: all tokens are shown alike."));
      return;
    }
    const named = steps.length === 1 ? `growth step ${after + 1}` : `growth steps ${after + 1} to ${growth.length}`;
    box.replaceChildren(
      make("h2", {}, "Growth"),
      make("p", {}, "New tokens, which came with ", named, ", are marked ", make("span.id.new", {}, "#123"), ". The others were there before."),
      quiet(steps.join("; ")),
      ...this.losses(),
      this.shares(),
      ...this.came(),
    );
  }

  show() {}

  // The same text before and after.
  losses() {
    const { sheet, state } = this, { before_bits: earlier, bits } = sheet.arrays;
    if (!earlier) return [];
    const mean = (found) => found.subarray(1).reduce((sum, one) => sum + one, 0) / Math.max(1, found.length - 1);
    const gains = Array.from(earlier, (one, i) => (i ? one - bits[i] : 0)), order = gains.map((_, i) => i).sort((a, b) => gains[b] - gains[a]);
    const better = gains.filter((gain) => gain > 0).length / Math.max(1, gains.length - 1);
    const rows = [[sheet.facts.before.title, mean(earlier)], ["now", mean(bits)]].map(([name, value]) =>
      make("li", {}, make("span.name", {}, name), bar(value / Math.max(mean(earlier), mean(bits))), make("span.number", {}, `${value.toFixed(2)} bits`)));
    const place = (at) => placeButton(sheet, at, (to) => state.choosePosition(to), make("span.number", {}, signed(-gains[at], 1)));
    return [
      section("The same text, before and after", make("ol.bars.wide", {}, ...rows),
        quiet(`Surprise of a ${sheet.facts.unit} on average, and less is better. ${percent(better)} of them surprise less than before. The training after the growth is part of this.`),
        make("button", { type: "button", onclick: () => state.set({ colour: "growth" }) }, "Colour the text by it")),
      section("Where it surprises less now", quiet("By how many bits."), list("ul.places", order.slice(0, PLACES_SHOWN).filter((at) => gains[at] > 0).map(place))),
    ];
  }

  shares() {
    const { sheet, state } = this, rows = [];
    for (const layer of sheet.seen) {
      const { tokens } = sheet.layers[layer], share = this.meanShare(layer), there = sheet.layers[layer].new / tokens;
      if (there > 0) rows.push(make("li", {}, make("span.name", {}, sheet.layerTitle(layer)), bar(share, "new"), make("span.number", {}, percent(share)), make("span.quiet", {}, `of ${percent(there)} of the tokens`)));
    }
    return section("What new tokens do", quiet("Of all that a layer adds in this text, the share that comes from new tokens; and how many of its tokens are new."),
      make("ol.bars.wide", {}, ...rows), make("button", { type: "button", onclick: () => state.set({ colour: "new" }) }, "Colour the text by it"));
  }

  meanShare(layer) {
    let sum = 0;
    for (let i = 0; i < this.sheet.positions; i++) sum += this.sheet.newShareIn(layer, i);
    return sum / this.sheet.positions;
  }

  came() {
    const { sheet, state } = this, rows = Array.from({ length: sheet.rows }, (_, row) => row).filter((row) => sheet.isNew(row));
    const by = (score, chosen = rows) => list("ul.cards", chosen.sort((a, b) => score(b) - score(a)).slice(0, NEW_SHOWN).map((row) => tokenLine(sheet, state, row)));
    const writers = rows.filter((row) => sheet.writes(row));
    if (!rows.length) return [];
    return [
      section("New tokens that help most", quiet("By what they add to the logit of what really comes next, on average. Each with the words that it makes likelier and the place where it fires most."), by((row) => sheet.arrays.helps[row], writers)),
      section("New tokens that do most", by((row) => sheet.arrays.use_ranks[row] + sheet.arrays.use[row] / 1e6, rows)),
    ];
  }
}
