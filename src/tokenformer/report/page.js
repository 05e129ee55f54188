// Draws the figures of the report. Enters: the JSON in #data, in the units of the axes, and one <figure data-…> a
// chart. Leaves: an <svg> in each, drawn anew when the window, a checkbox or a zoom changes.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const state = { hidden: new Set(), log: data.log, training: true };
const LANE = 30; // pixels: the two lines of a growth step's label above a chart
const MOST_LANES = 4;
const NEAR = 8; // pixels from the pointer
const valueOf = (point) => point[data.axes.length]; // after its place on each axis
const escaped = (text) => text.replace(/[&<>"]/g, (sign) => `&#${sign.charCodeAt(0)};`);
const colour = (run) => `style="--run: var(--run-${run % data.colours})"`;

function linearTicks([low, high], wanted) {
  const rough = (high - low) / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) {
    ticks.push({ at: i * step, text: (i * step).toFixed(digits) });
  }
  return ticks;
}

function logTicks([low, high], wanted) {
  const few = Math.log10(high / low) > wanted / 2.5;
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
    for (const factor of few ? [1] : [1, 2, 5]) {
      const at = Number(`${factor}e${power}`);
      if (at >= low && at <= high) ticks.push({ at, text: String(at) });
    }
  }
  return ticks;
}

// A map from values to pixels and back.
function makeScale(range, pixels, log, wanted) {
  const bend = log ? Math.log10 : (value) => value;
  const unbend = log ? (value) => 10 ** value : (value) => value;
  const [low, high] = range.map(bend);
  const slope = (pixels[1] - pixels[0]) / (high - low);
  const ticks = log ? logTicks(range, wanted) : [];
  return {
    to: (value) => pixels[0] + (bend(value) - low) * slope,
    from: (pixel) => unbend(low + (pixel - pixels[0]) / slope),
    ticks: ticks.length > 1 ? ticks : linearTicks(range, wanted),
  };
}

const shown = (value) => (Math.abs(value) >= 1000 ? value.toFixed(0) : Number(value.toPrecision(4)).toString());

class Chart {
  constructor(figure) {
    this.figure = figure;
    this.x = data.axes.findIndex(({ name }) => name === figure.dataset.x); // which of a point's places
    this.axis = data.axes[this.x];
    this.panel = figure.dataset.panel; // a small chart of one run, or undefined
    this.only = Number(figure.dataset.run);
    this.zoom = null;
    figure.insertAdjacentHTML("beforeend", '<svg role="img"></svg><div class="tip" hidden></div>');
    this.svg = figure.querySelector("svg");
    this.svg.setAttribute("aria-label", figure.querySelector("figcaption").textContent);
    this.tip = figure.querySelector(".tip");
    this.svg.addEventListener("pointermove", (event) => this.hover(event));
    this.svg.addEventListener("pointerleave", () => this.leave());
    if (!this.panel) this.listenForZoom();
  }

  // The curves to draw, as { run, name, points }.
  curves() {
    if (this.panel) return [{ run: this.only, name: this.panel, points: data.runs[this.only][this.panel] }];
    const names = state.training ? ["training", "validation"] : ["validation"];
    return data.runs.flatMap((run, i) =>
      state.hidden.has(i) ? [] : names.map((name) => ({ run: i, name, points: run[name] })),
    );
  }

  growths() {
    const runs = this.panel ? [this.only] : data.runs.keys();
    return [...runs].filter((i) => this.panel || !state.hidden.has(i)).flatMap((i) =>
      data.runs[i].growths.map((growth) => ({ ...growth, run: i, x: growth.at[this.x] })),
    );
  }

  // Values to be seen between two places of the horizontal axis.
  valueRange(curves, [start, end]) {
    const inside = (point) => point[this.x] >= start && point[this.x] <= end;
    const values = curves.flatMap(({ points }) => points.filter(inside)).map(valueOf);
    if (!values.length) return [0, 1];
    const [low, high] = [values.reduce((a, b) => Math.min(a, b)), values.reduce((a, b) => Math.max(a, b))];
    if (this.panel === "grad_norm" && low > 0) return [low / 1.15, high * 1.15];
    if (this.panel && this.panel !== "bits_per_byte") return [0, high * 1.08 || 1];
    const margin = 0.06 * (high - low) || 0.05;
    return [low - margin, high + margin];
  }

  // Growth labels, each in the lowest lane that has room for it. If there are too many, none: the pointer and the
  // tables still tell, and some without the others would mislead.
  lanes(growths, place) {
    const ends = [];
    const labels = [...growths].sort((a, b) => a.x - b.x).map((growth) => {
      const half = 3.1 * Math.max(growth.parameters.length, growth.loss.length);
      const free = ends.findIndex((end) => end + 8 <= place(growth.x) - half);
      const lane = free < 0 ? ends.length : free;
      ends[lane] = place(growth.x) + half;
      return { ...growth, lane };
    });
    return ends.length > MOST_LANES ? { labels: [], count: 0 } : { labels, count: ends.length };
  }

  draw() {
    const curves = this.curves();
    const width = this.figure.clientWidth;
    const [left, right, bottom] = this.panel ? [58, 8, 42] : [54, 48, 46];
    const log = state.log && this.axis.start > 0 && this.axis.start < this.axis.end;
    const full = log ? [this.axis.start, this.axis.end * 1.02] : [0, this.axis.end * 1.01 || 1];
    const across = this.zoom || full;
    this.horizontal = makeScale(across, [left, width - right], log, width / 110);
    this.visible = this.growths().filter(({ x }) => x >= across[0] && x <= across[1]);
    const { labels, count } = this.panel ? { labels: [], count: 0 } : this.lanes(this.visible, this.horizontal.to);
    const top = this.panel ? 8 : 12 + LANE * count;
    const height = this.panel ? 190 : 400 + top;
    const fixed = !this.panel && !this.zoom;
    const range = fixed ? this.axis[log ? "log_loss" : "linear_loss"] : this.valueRange(curves, across);
    const logarithmic = this.panel === "grad_norm" && range[0] > 0;
    this.vertical = makeScale(range, [height - bottom, top], logarithmic, this.panel ? 5 : 7);
    const bent = (title, isLog) => (isLog ? `${title}, logarithmic` : title);
    this.titles = [bent(this.axis.title, log), bent(this.figure.dataset.label || data.loss_label, logarithmic)];
    this.box = { left, right: width - right, top, bottom: height - bottom };
    const clip = `clip-${this.figure.id}`;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.innerHTML = [
      `<clipPath id="${clip}"><path d="M${left} ${top}H${width - right}V${height - bottom}H${left}"/></clipPath>`,
      this.drawAxes(),
      ...this.visible.map((growth) => this.drawGrowth(growth)),
      ...labels.map((label) => this.drawLabel(label)),
      `<g clip-path="url(#${clip})">${curves.map((one) => this.drawCurve(one)).join("")}</g>`,
      '<g class="pointer"></g>',
    ].join("");
    this.pointer = this.svg.querySelector(".pointer");
    this.leave();
  }

  drawAxes() {
    const { left, right, top, bottom } = this.box;
    const parts = [];
    for (const { at, text } of this.vertical.ticks) {
      const y = this.vertical.to(at);
      parts.push(`<line class="grid" x1="${left}" x2="${right}" y1="${y}" y2="${y}"/>`);
      parts.push(`<text x="${left - 8}" y="${y + 4}" text-anchor="end">${text}</text>`);
    }
    for (const { at, text } of this.horizontal.ticks) {
      const x = this.horizontal.to(at);
      parts.push(`<line class="frame" x1="${x}" x2="${x}" y1="${bottom}" y2="${bottom + 5}"/>`);
      parts.push(`<text x="${x}" y="${bottom + 18}" text-anchor="middle">${text}</text>`);
    }
    parts.push(`<path class="frame" d="M${left} ${top}V${bottom}H${right}"/>`);
    const middle = (left + right) / 2;
    parts.push(`<text class="title" x="${middle}" y="${bottom + 36}" text-anchor="middle">${this.titles[0]}</text>`);
    const turned = `transform="translate(14 ${(top + bottom) / 2}) rotate(-90)"`;
    parts.push(`<text class="title" ${turned} text-anchor="middle">${this.titles[1]}</text>`);
    return parts.join("");
  }

  drawGrowth({ run, x }) {
    const at = this.horizontal.to(x);
    const { top, bottom } = this.box;
    return `<line class="growth" ${colour(run)} x1="${at}" x2="${at}" y1="${top - 3}" y2="${bottom}"/>`;
  }

  drawLabel({ run, x, lane, parameters, loss }) {
    const at = this.horizontal.to(x);
    const base = this.box.top - 8 - LANE * lane;
    const lines = `<tspan x="${at}" dy="-13">${parameters}</tspan><tspan x="${at}" dy="13">${loss}</tspan>`;
    return `<text class="label" ${colour(run)} y="${base}" text-anchor="middle">${lines}</text>`;
  }

  drawCurve({ run, name, points }) {
    const seen = points.filter((point) => point[this.x] > 0 || !state.log);
    const places = seen.map((point) => [this.horizontal.to(point[this.x]), this.vertical.to(valueOf(point))]);
    const path = places.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L");
    const alone = this.panel || !data.runs[run].validation.length;
    const kind = alone ? "alone" : name;
    const dots = name === "validation" && places.length <= 120 ? places : [];
    const line = path && `<path class="line ${kind}" d="M${path}"/>`;
    const circles = dots.map(([x, y]) => `<circle class="dot" cx="${x}" cy="${y}" r="2.6"/>`).join("");
    return `<g ${colour(run)}>${line}${circles}</g>`;
  }

  // The pointer's place in the pixels of the drawing, which print and zoom may have scaled.
  place(event) {
    const frame = this.svg.getBoundingClientRect();
    const scale = this.svg.viewBox.baseVal.width / frame.width;
    return [(event.clientX - frame.left) * scale, (event.clientY - frame.top) * scale];
  }

  hover(event) {
    const [x, y] = this.place(event);
    const { left, right, top, bottom } = this.box;
    if (x < left || x > right) return this.leave();
    const at = this.horizontal.from(x);
    const marks = [`<line class="guide" x1="${x}" x2="${x}" y1="${top}" y2="${bottom}"/>`];
    const lines = [`<b>${shown(at)} ${this.axis.unit}</b>`];
    const values = new Map(); // of every run that had been measured here
    for (const { run, name, points } of this.curves()) {
      const near = nearest(points, this.x, at);
      if (!near) continue;
      const [cx, cy] = [this.horizontal.to(near[this.x]), this.vertical.to(valueOf(near))];
      const inside = points[0][this.x] <= at && at <= points.at(-1)[this.x];
      if (!inside && Math.abs(cx - x) > NEAR) continue;
      if (cy >= top && cx >= left && cx <= right) {
        marks.push(`<circle class="dot" ${colour(run)} cx="${cx}" cy="${cy}" r="4"/>`);
      }
      const value = this.panel ? shown(valueOf(near)) : `${name} ${valueOf(near).toFixed(4)}`;
      values.set(run, [...(values.get(run) || []), value]);
    }
    const add = (run, text) => lines.push(`<span ${colour(run)}><i class="swatch"></i> ${text}</span>`);
    for (const [run, found] of values) {
      add(run, (this.panel ? "" : `${escaped(data.runs[run].label)}: `) + found.join(", "));
    }
    for (const growth of this.visible.filter((one) => Math.abs(this.horizontal.to(one.x) - x) < NEAR)) {
      const what = `${growth.parameters} parameters, validation loss ${growth.loss}`;
      add(growth.run, `grown by ${escaped(growth.method)}: ${what}`);
    }
    if (this.brush) marks.push(this.drawBrush(x));
    this.pointer.innerHTML = marks.join("");
    this.tip.innerHTML = lines.join("<br>");
    this.tip.hidden = false;
    const aside = x > (left + right) / 2 ? x - this.tip.offsetWidth - 16 : x + 16;
    this.tip.style.left = `${Math.max(0, aside)}px`;
    const above = this.svg.getBoundingClientRect().top - this.figure.getBoundingClientRect().top;
    this.tip.style.top = `${above + Math.min(y + 12, bottom - this.tip.offsetHeight)}px`;
  }

  leave() {
    this.pointer.innerHTML = "";
    this.tip.hidden = true;
    this.brush = null;
  }

  drawBrush(x) {
    const { top, bottom } = this.box;
    const [start, end] = [Math.min(x, this.brush), Math.max(x, this.brush)];
    return `<rect class="brush" x="${start}" y="${top}" width="${end - start}" height="${bottom - top}"/>`;
  }

  listenForZoom() {
    this.svg.addEventListener("pointerdown", (event) => {
      if (event.pointerType === "mouse") this.brush = Math.max(this.place(event)[0], this.box.left);
    });
    this.svg.addEventListener("pointerup", (event) => {
      if (!this.brush) return;
      const ends = [this.brush, this.place(event)[0]].sort((a, b) => a - b);
      this.leave();
      if (ends[1] - ends[0] < 6) return;
      this.zoom = ends.map(this.horizontal.from);
      this.draw();
    });
    this.svg.addEventListener("dblclick", () => {
      this.zoom = null;
      this.draw();
    });
  }
}

// The point of a curve nearest to a place on the axis, by halving.
function nearest(points, x, at) {
  let [low, high] = [0, points.length - 1];
  if (high < 0) return null;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle][x] <= at) low = middle;
    else high = middle;
  }
  return at - points[low][x] <= points[high][x] - at ? points[low] : points[high];
}

const charts = [...document.querySelectorAll("figure")].map((figure) => new Chart(figure));
const drawAll = () => charts.forEach((chart) => chart.draw());

document.querySelectorAll("#runs input").forEach((box, i) =>
  box.addEventListener("change", () => {
    state.hidden[box.checked ? "delete" : "add"](i);
    box.closest("tr").classList.toggle("off", !box.checked);
    drawAll();
  }),
);
for (const name of ["log", "training"]) {
  const box = document.getElementById(name);
  box.checked = state[name];
  box.addEventListener("change", () => {
    state[name] = box.checked;
    charts.forEach((chart) => (chart.zoom = null));
    drawAll();
  });
}
window.addEventListener("resize", drawAll);
drawAll();
