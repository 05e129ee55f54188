// Puts the page together: views of one sheet that follow one state, tabs, theme, and the keys that work everywhere.

const LEGENDS = {
  surprise: (sheet) => sheet.facts.image ? ["How much all tokens together add at each patch.", "", "much"]
    : [`How unexpected each ${sheet.facts.unit} was: no colour was foreseen.`, "", `${BITS} bits or more`],
  token: (sheet, row) => [row < 0 ? "Where the chosen token fires." : `Where ${sheet.tokenTitle(row)} fires.`, "takes its value away", "adds its value"],
  growth: () => ["What became of each piece since before the growth.", "surprises more", "surprises less"],
  new: () => ["Of all that the layers add here, the share by new tokens.", "", "all of it"],
  change: () => ["What your switches change.", "surprises more", "surprises less"],
};
const COLOUR_NAMES = { surprise: "surprise", token: "the chosen token", growth: "what growth changed", new: "what new tokens do", change: "what the switches change" };
const TAB_NAMES = { position: "Here", token: "Token", find: "Find", growth: "Growth", live: "What if" };

class Page {
  constructor() {
    byId("theme").onclick = () => this.theme();
    byId("link").onclick = () => this.copyLink();
    byId("colour").onchange = () => this.state.set({ colour: byId("colour").value });
    document.addEventListener("keydown", (event) => this.key(event));
  }

  // Show a sheet. `text` is what was typed in, if it is not the one that the page was written for.
  open(sheet, text, from = {}) {
    const state = (this.state = new State(sheet)), live = Boolean(sheet.facts.live);
    state.chosen.text = text;
    Object.assign(state.chosen, from);
    this.sheet = sheet;
    this.text = new TextView(byId("pieces"), sheet, state);
    this.views = { position: new PositionView(byId("position"), sheet, state) };
    if (live) {
      this.views.live = new LiveView(byId("live"), sheet, state, async (facts, typed) => this.open(await Sheet.read({ ...facts, live: sheet.facts.live }), typed));
      this.views.live.text = this.text;
    }
    this.views.token = new CardView(byId("token"), sheet, state, this.views.live);
    this.views.find = new FindView(byId("find"), sheet, state);
    this.views.growth = new GrowthView(byId("growth"), sheet, state);
    this.describe();
    this.makeTabs(live);
    this.makeColours();
    byId("help-live").hidden = !live;
    state.listen((chosen, before) => this.show(chosen, before));
    this.show(state.chosen, null);
  }

  describe() {
    const { model, of, unit, notes } = this.sheet.facts, tokens = this.sheet.layers.reduce((sum, layer) => sum + layer.tokens, 0);
    byId("title").textContent = model.name;
    document.title = `Inside ${model.name}`;
    byId("facts").textContent = `${count(model.parameters)} parameters, ${count(tokens)} parameter tokens. Shown: ${of}, ${plural(this.sheet.positions, unit, unit === "patch" ? "patches" : `${unit}s`)}.`;
    byId("notes").replaceChildren(...notes.map((note) => make("p.note", {}, note)));
    byId("unit").textContent = unit === "byte" ? "character" : unit;
  }

  makeTabs(live) {
    const tabs = TABS.filter((tab) => tab !== "live" || live).map((tab) =>
      make("button", { type: "button", role: "tab", id: `tab-${tab}`, "aria-controls": tab, onclick: () => this.state.set({ tab }) }, TAB_NAMES[tab]));
    byId("tabs").replaceChildren(...tabs);
    byId("tabs").onkeydown = (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key], shown = tabs.filter((tab) => tab.offsetParent);
      if (!step) return;
      const next = shown[(shown.indexOf(document.activeElement) + step + shown.length) % shown.length];
      next.click();
      next.focus();
    };
  }

  // What the select offers; a link may ask for a colour or a tab that this page does not have.
  makeColours() {
    const { facts, arrays } = this.sheet, known = { surprise: true, token: true, growth: Boolean(arrays.before_bits), new: facts.growth.length > facts.new_after, change: Boolean(facts.live) && !facts.image };
    if (!known[this.state.chosen.colour]) this.state.chosen.colour = "surprise";
    if (!facts.live && this.state.chosen.tab === "live") this.state.chosen.tab = "position";
    byId("colour").replaceChildren(...COLOURS.filter((colour) => known[colour]).map((colour) =>
      make("option", { value: colour }, facts.image && colour === "surprise" ? "activity" : COLOUR_NAMES[colour])));
  }

  show(chosen, before) {
    const changed = (...names) => !before || names.some((name) => chosen[name] !== before[name]);
    if (changed("tab")) this.showTab(chosen.tab);
    if (changed("at")) this.text.mark(chosen.at);
    if (changed("at", "shown", "layer", "token")) this.views.position.show();
    if (changed("layer", "token")) this.views.token.show();
    if (changed("at")) byId("said").textContent = `Position ${chosen.at + 1}: ${this.sheet.piece(chosen.at)}`;
    this.views.live?.show(chosen, before);
    if (changed("colour", "layer", "token") || chosen.colour === "change") this.colour(chosen);
  }

  colour({ colour, layer }) {
    const select = byId("colour");
    select.value = colour;
    select.querySelector('[value="token"]').disabled = layer === null;
    this.text.colour(colour);
    const [said, low, high] = LEGENDS[colour](this.sheet, this.state.row);
    byId("legend").replaceChildren(make("span", {}, said), low && make("span.scale.minus", {}, low), make("span.scale.plus", {}, high));
    if (colour === "token" && this.views.live && layer !== null) this.exact();
  }

  async exact() {
    const { layer, token } = this.state.chosen;
    if (this.text.exact?.layer === layer && this.text.exact?.token === token) return;
    if (await this.views.live.exactWeights()) if (this.state.chosen.colour === "token") this.text.colour("token");
  }

  showTab(tab) {
    document.body.dataset.tab = tab;
    for (const button of byId("tabs").children) {
      const chosen = button.id === `tab-${tab}`;
      button.setAttribute("aria-selected", String(chosen));
      button.tabIndex = chosen || (tab === "position" && button.id === "tab-token") ? 0 : -1;
    }
  }

  theme() {
    const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)").matches;
    const now = root.dataset.theme || (dark ? "dark" : "light");
    root.dataset.theme = now === "dark" ? "light" : "dark";
  }

  async copyLink() {
    let said = "Copied";
    try {
      await navigator.clipboard.writeText(location.href);
    } catch {
      said = "It is in the address bar"; // a page from the disk may not write to the clipboard
    }
    byId("link").textContent = said;
    setTimeout(() => (byId("link").textContent = "Copy link"), 2000);
  }

  key(event) {
    const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName) && event.target.type !== "range" && event.target.type !== "checkbox";
    if (typing) return;
    if (event.key === "/") {
      event.preventDefault();
      this.state.set({ tab: "find" });
      this.views.find.focus();
    }
    if (event.key.toLowerCase() === "z" && (event.ctrlKey || event.metaKey) && this.views.live) {
      event.preventDefault();
      this.state.undo();
    }
  }
}

async function start() {
  if (matchMedia("(max-width: 799px)").matches) byId("help").open = false;
  const facts = JSON.parse(byId("sheet").textContent), first = await Sheet.read(facts), page = new Page();
  const link = location.hash, typed = new URLSearchParams(link.replace(/^#/, "")).get("text");
  page.open(first, null, State.parse(link, first));
  if (facts.live && typed) {
    const other = await page.views.live.post("api/sheet", { text: typed });
    if (other) {
      const sheet = await Sheet.read({ ...other, live: facts.live });
      page.open(sheet, typed, State.parse(link, sheet));
    }
  }
  addEventListener("hashchange", () => page.open(page.sheet, page.state.chosen.text, State.parse(location.hash, page.sheet)));
}

start();
