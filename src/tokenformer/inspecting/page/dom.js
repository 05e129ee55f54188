// Elements and numbers. Text of the model and of the user reaches the page through `make` as text, never as markup.

// make("p.quiet", { title: "…" }, "text", child, …)
function make(kind, attributes = {}, ...children) {
  const [tag, ...classes] = kind.split("."), element = document.createElement(tag);
  element.className = classes.join(" ");
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name.startsWith("--")) element.style.setProperty(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

const byId = (id) => document.getElementById(id);
const count = (number) => number.toLocaleString("en");
const percent = (share) => (share >= 0.0995 || !share ? `${Math.round(share * 100)} %` : share < 0.0005 ? "<0.1 %" : `${(share * 100).toFixed(1)} %`);
const signed = (number, digits = 2) => `${number < 0 ? "−" : "+"}${Math.abs(number).toFixed(digits)}`;
const plural = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;

// A bar of a share of the width, from 0 to 1.
const bar = (share, kind = "") => make(`span.bar${kind && `.${kind}`}`, { "--share": Math.min(1, share), "aria-hidden": "true" });
const chip = (text, title, kind = "") => make(`span.chip${kind && `.${kind}`}`, { title }, make("bdi", {}, text));

// A place in the text as a button: what is before, the piece itself, what is after.
function placeButton(sheet, position, go, more = null) {
  const { before, here, after } = sheet.around(position);
  const text = make("span.context", {}, make("bdi", {}, before), make("mark", {}, make("bdi", {}, here)), make("bdi", {}, after));
  return make("button.place", { type: "button", title: `position ${position + 1}`, onclick: () => go(position) }, text, more);
}

function section(title, ...children) {
  return make("section.part", {}, make("h3", {}, title), ...children);
}

const list = (kind, items) => make(kind, {}, ...items.map((item) => make("li", {}, item)));
const quiet = (...text) => make("p.quiet", {}, ...text);
