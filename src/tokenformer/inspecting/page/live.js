// The live part: tokens switched off or scaled, and what the model then says. Every request to the server carries the
// whole state of switches; the server keeps none.

const WAIT = 120; // milliseconds after the last change until the server is asked
const MOST_FACTOR = 3;

class LiveView {
  constructor(box, sheet, state, openText) {
    Object.assign(this, { box, sheet, state, openText });
    this.asked = 0; // the number of the newest request
    this.switched = make("div");
    this.boxes = setsOf(sheet).map(({ name, title, more }) => {
      const input = make("input", { type: "checkbox", value: name, onchange: () => this.toggleSet(name, input.checked) });
      return { name, input, label: make("label.check", { title: more }, input, ` without ${title}`) };
    });
    this.undo = make("button", { type: "button", onclick: () => this.state.undo() }, "Undo");
    this.reset = make("button", { type: "button", onclick: () => this.state.set({ switches: [], sets: [] }) }, "All as it was");
    this.recolour = make("button", { type: "button", onclick: () => this.colourText() }, "Colour the text by what changes");
    this.said = make("p.quiet", { role: "status" });
    this.answer = make("div");
    this.input = make("textarea", { rows: 4, maxlength: sheet.facts.live.most_text, spellcheck: "false", "aria-label": "Another text" });
    this.input.value = state.chosen.text ?? "";
    const another = sheet.facts.image ? "" : section("Another text", this.input, make("button", { type: "button", onclick: () => this.open() }, "Look at this text"));
    box.replaceChildren(
      make("h2", {}, "What if …"),
      this.switched,
      this.boxes.length ? make("div.checks", {}, ...this.boxes.map(({ label }) => label)) : "",
      make("p.buttons", {}, this.undo, this.reset, sheet.facts.image ? "" : this.recolour),
      this.said,
      this.answer,
      another,
    );
  }

  show(chosen = this.state.chosen, before = null) {
    const { switches, sets } = chosen, changed = !before || switches !== before.switches || sets !== before.sets;
    this.undo.disabled = !this.state.undoable.length;
    this.reset.disabled = this.recolour.disabled = !switches.length && !sets.length;
    for (const { name, input } of this.boxes) input.checked = sets.includes(name);
    if (changed) this.showSwitches(switches);
    this.control?.update();
    if (changed || chosen.at !== before.at || (chosen.tab === "live" && before.tab !== "live")) this.later();
  }

  showSwitches(switches) {
    const items = switches.map(([layer, token, factor]) => {
      const row = this.sheet.find(layer, token), name = `#${token} in ${this.sheet.layerTitle(layer)}`;
      const title = row < 0 ? make("span", {}, name) : make("button.link", { type: "button", onclick: () => this.state.chooseToken(row) }, name);
      return make("span.switch", {}, title, make("span.number", {}, factor === null ? "off" : `× ${factor}`),
        make("button", { type: "button", "aria-label": `Put ${name} back`, onclick: () => this.put(layer, token, 1) }, "put back"));
    });
    this.switched.replaceChildren(items.length ? list("ul.switches", items) : quiet("No token is switched. Choose one, and switch it off or scale it on its card."));
  }

  // The list of switches with this token at a factor: null is off, as if it were not there; 1 is as it was.
  static changed(switches, layer, token, factor) {
    const others = switches.filter(([l, t]) => l !== layer || t !== token);
    return factor === 1 ? others : [...others, [layer, token, factor]];
  }

  put(layer, token, factor) {
    this.state.set({ switches: LiveView.changed(this.state.chosen.switches, layer, token, factor) });
  }

  toggleSet(name, without) {
    const others = this.state.chosen.sets.filter((one) => one !== name);
    this.state.set({ sets: without ? [...others, name] : others });
  }

  // The switch on the card of a token.
  tokenSwitch(layer, token) {
    const { state } = this;
    const off = make("button", { type: "button", onclick: () => this.put(layer, token, off.getAttribute("aria-pressed") === "true" ? 1 : null) }, "Switch off");
    const slider = make("input", { type: "range", min: 0, max: MOST_FACTOR, step: 0.1, "aria-label": "Scale what it adds" });
    const said = make("output");
    let before = null; // what undo returns to after a drag
    slider.oninput = () => {
      before ??= { switches: state.chosen.switches, sets: state.chosen.sets };
      state.apply({ switches: LiveView.changed(state.chosen.switches, layer, token, Number(slider.value)) });
    };
    slider.onchange = () => {
      if (before) state.undoable.push(before);
      before = null;
      this.undo.disabled = !state.undoable.length;
    };
    const update = () => {
      const found = state.chosen.switches.find(([l, t]) => l === layer && t === token), factor = found ? found[2] : 1;
      off.setAttribute("aria-pressed", String(factor === null));
      slider.value = factor ?? 0;
      said.textContent = factor === null ? "off" : `× ${factor}`;
    };
    this.control = { update };
    update();
    const see = make("button", { type: "button", onclick: () => state.set({ tab: "live" }) }, "See what changes");
    return make("p.buttons", {}, off, make("label.scale", {}, slider, " ", said), see);
  }

  later() {
    this.answer.setAttribute("aria-busy", "true"); // what is shown is of an earlier state
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.ask(), WAIT);
  }

  request() {
    const { switches, sets, at } = this.state.chosen, { image, live } = this.sheet.facts;
    if (image) return { switches, sets };
    const ids = Array.from(this.sheet.arrays.ids.subarray(Math.max(0, at + 1 - live.context), at + 1));
    return { ids, switches, sets };
  }

  async ask() {
    const number = ++this.asked;
    const answer = await this.post("api/answer", this.request());
    if (number !== this.asked) return;
    this.answer.setAttribute("aria-busy", "false");
    if (!answer) return;
    Object.assign(this.sheet.facts.words, answer.words);
    this.answer.replaceChildren(...this.answered(answer));
    this.say(`Computed in ${Math.round(answer.milliseconds)} ms.`);
  }

  answered({ before, after }) {
    const { sheet } = this, image = sheet.facts.image;
    const shares = new Map(before.next.map(([id, share]) => [id, [share, 0]]));
    for (const [id, share] of after.next) shares.set(id, [shares.get(id)?.[0] ?? 0, share]);
    const rows = [...shares].map(([id, [old, now]]) => make("li.two", {}, chip(sheet.word(id)),
      make("span.pair", {}, bar(old, "old"), bar(now)), make("span.number", {}, `${percent(old)} → ${percent(now)}`)));
    const differs = before.text !== after.text;
    const parts = [section(image ? "The image is taken for" : `Expected after position ${count(this.state.chosen.at + 1)}`, quiet("Grey: as the model is. Colour: with your switches."), make("ol.bars", {}, ...rows))];
    if (!image) {
      const same = [...before.text].findIndex((sign, i) => sign !== [...after.text][i]), from = same < 0 ? after.text.length : [...after.text].slice(0, same).join("").length;
      parts.push(section("Goes on", make("h4", {}, "as the model is"), make("pre", { tabindex: 0 }, before.text),
        make("h4", {}, differs ? "with your switches" : "with your switches: the same"), make("pre.after", { tabindex: 0 }, after.text.slice(0, from), from < after.text.length && make("mark", {}, after.text.slice(from)))));
    }
    return parts;
  }

  async colourText() {
    this.say("Reading the text again …");
    const { switches, sets } = this.state.chosen;
    const answer = await this.post("api/change", { ids: Array.from(this.sheet.arrays.ids), switches, sets });
    if (!answer) return;
    this.text.change = answer.change;
    this.state.set({ colour: "change" });
    const mean = answer.change.reduce((sum, bits) => sum + bits, 0) / Math.max(1, answer.change.length - 1);
    this.say(`With your switches a ${this.sheet.facts.unit} surprises by ${signed(mean, 3)} bits more on average.`);
  }

  // All weights of the token on the card, where the page only has the largest.
  async exactWeights() {
    const { layer, token } = this.state.chosen;
    const ids = this.sheet.facts.image ? undefined : Array.from(this.sheet.arrays.ids);
    const answer = await this.post("api/token", { ids, layer, token });
    if (answer) this.text.exact = { layer, token, weights: answer.weights };
    return Boolean(answer);
  }

  async open() {
    this.say("Reading …");
    const text = this.input.value, facts = await this.post("api/sheet", { text });
    if (facts) this.openText(facts, text);
  }

  say(text, wrong = false) {
    this.said.textContent = text;
    this.said.classList.toggle("wrong", wrong);
  }

  async post(path, body) {
    try {
      const response = await fetch(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
      const answer = await response.json();
      if (response.ok) return answer;
      this.say(answer.error.message, true);
    } catch {
      this.say("The server cannot be reached.", true);
    }
    return null;
  }
}
