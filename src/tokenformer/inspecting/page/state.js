// What is chosen, as one object that the link of the page holds. Enters: changes. Leaves: the same to everybody who
// listens, and in the address behind the #, so that a link shows what one sees.

const COLOURS = ["surprise", "token", "growth", "new", "change"];
const TABS = ["position", "token", "find", "growth", "live"];
const SHOWN = ["feed-forward", "writes", "all"];
const MOST_SWITCHES = 200;
const MOST_LINK_TEXT = 2000;

class State {
  constructor(sheet) {
    this.sheet = sheet;
    this.listeners = [];
    this.undoable = [];
    this.chosen = this.first();
  }

  first() {
    return { at: Math.min(31, this.sheet.positions - 1), layer: null, token: null, colour: "surprise", tab: "position", shown: "feed-forward", switches: [], sets: [], text: null };
  }

  get row() {
    const { layer, token } = this.chosen;
    return layer === null ? -1 : this.sheet.find(layer, token);
  }

  listen(listener) {
    this.listeners.push(listener);
  }

  // Change some of what is chosen. Switches of tokens can be undone.
  set(changes) {
    if ("switches" in changes || "sets" in changes) {
      const { switches, sets } = this.chosen;
      this.undoable.push({ switches, sets });
    }
    this.apply(changes);
  }

  apply(changes) {
    const before = this.chosen;
    this.chosen = { ...before, ...changes };
    history.replaceState(null, "", this.link());
    for (const listener of this.listeners) listener(this.chosen, before);
  }

  undo() {
    const last = this.undoable.pop();
    if (last) this.apply(last);
  }

  choosePosition(at) {
    const tab = this.chosen.tab === "live" ? "live" : "position";
    this.set({ at: Math.max(0, Math.min(this.sheet.positions - 1, at)), tab });
  }

  chooseToken(row) {
    const layer = this.sheet.layerOf[row];
    this.set({ layer, token: this.sheet.token(row), colour: "token", tab: "token" });
  }

  link() {
    const { at, layer, token, colour, tab, shown, switches, sets, text } = this.chosen, parts = new URLSearchParams();
    parts.set("at", at + 1);
    if (layer !== null) parts.set("token", `${layer}.${token}`);
    parts.set("colour", colour);
    parts.set("tab", tab);
    if (shown !== "feed-forward") parts.set("layers", shown);
    if (switches.length) parts.set("switched", switches.map(([l, t, factor]) => `${l}.${t}${factor === null ? "" : `x${factor}`}`).join(" "));
    if (sets.length) parts.set("without", sets.join(" "));
    if (text !== null && text.length <= MOST_LINK_TEXT) parts.set("text", text);
    return `#${parts}`;
  }

  // What a link says, as far as it makes sense for this sheet.
  static parse(link, sheet) {
    const parts = new URLSearchParams(link.replace(/^#/, "")), found = {};
    const at = Number(parts.get("at"));
    if (Number.isInteger(at) && at >= 1 && at <= sheet.positions) found.at = at - 1;
    const token = State.parseToken(parts.get("token") ?? "", sheet);
    if (token) [found.layer, found.token] = token;
    for (const [name, key, known] of [["colour", "colour", COLOURS], ["tab", "tab", TABS], ["shown", "layers", SHOWN]]) {
      if (known.includes(parts.get(key))) found[name] = parts.get(key);
    }
    if (found.colour === "token" && !token) delete found.colour;
    found.switches = (parts.get("switched") ?? "").split(" ").map((one) => State.parseToken(one, sheet)).filter(Boolean).slice(0, MOST_SWITCHES);
    const known = setsOf(sheet).map(({ name }) => name);
    found.sets = (parts.get("without") ?? "").split(" ").filter((name) => known.includes(name));
    return found;
  }

  static parseToken(text, sheet) {
    const found = /^(\d{1,5})\.(\d{1,9})(?:x(-?\d+(?:\.\d+)?))?$/.exec(text);
    if (!found) return null;
    const [layer, token, factor] = [Number(found[1]), Number(found[2]), found[3] === undefined ? null : Number(found[3])];
    return layer < sheet.layers.length && token < sheet.layers[layer].tokens ? [layer, token, factor] : null;
  }
}

// The sets of tokens that can be switched off together: those of a growth step, those of a group.
function setsOf(sheet) {
  const steps = sheet.facts.growth.map((step, i) => ({ name: `step:${i + 1}`, title: `all tokens of growth step ${i + 1}`, more: step }));
  return [...steps, ...sheet.facts.groups.map((group) => ({ name: `group:${group}`, title: `the token group ${group}`, more: null }))];
}
