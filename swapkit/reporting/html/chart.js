"use strict";
// A figure of the page: a canvas with axes. A drag zooms all charts on one horizontal axis, a
// double click shows all of it again, and the text beside the pointer says what is there.

// The palette of Okabe and Ito, which people with colour blindness tell apart. "ink" and "blue" are
// colours of the style sheet, which are lighter in the dark.
const [SKY, GREEN, YELLOW, ORANGE] = ["#56b4e9", "#009e73", "#f0e442", "#e69f00"];
const [RED, PURPLE, GREY, DEEP] = ["#cf1020", "#cc79a7", "#999999", "#0072b2"];
const DASHES = { line: [], dashes: [6, 4], dots: [2, 3], dashdot: [8, 3, 2, 3] };
const [LEFT, RIGHT, TOP, BOTTOM] = [104, 20, 8, 42]; // pixels around a chart

const root = document.documentElement;
const dark = matchMedia("(prefers-color-scheme: dark)");
const printed = matchMedia("print");
const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
const charts = [];

const find = (selector, within = document) => within.querySelector(selector);

function add(parent, tag, text = "", attributes = {}) {
  const made = document.createElement(tag);
  made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  parent.append(made);
  return made;
}

// size: of the unit in which its values are written; isLog; names: of rows instead of values
const makeAxis = (low, high, label, size = 1, more = {}) =>
  ({ low, high, from: low, to: high, label, size, charts: [], ...more });

const asStairs = (xs, ys, end) =>
  xs.flatMap((x, at) => [[x, ys[at]], [xs[at + 1] ?? end, ys[at]]]);

function listTicks({ from, to, size, isLog }) {
  const found = [];
  if (isLog) {
    for (let power = Math.floor(Math.log10(from / size)); 10 ** power <= to / size; power++) {
      found.push(...[1, 2, 5].map((each) => each * 10 ** power * size));
    }
  } else {
    const raw = (to - from) / size / 7;
    const power = 10 ** Math.floor(Math.log10(raw));
    const gap = size * power * [1, 2, 2.5, 5, 10].find((each) => each * power >= raw);
    for (let at = Math.ceil(from / gap); at * gap <= to; at++) found.push(at * gap);
  }
  return found.filter((each) => each >= from && each <= to);
}

class Chart {
  // keys: of the legend, each a mark, a colour and a text; draw: adds the content to the chart;
  // tell: returns the lines of text for a place, or null.
  constructor(name, height, { x, y, keys, draw, tell }) {
    Object.assign(this, { height, x, y, draw, tell });
    const title = find(`#figure-${name} h3`);
    const legend = document.createElement("ul");
    legend.className = "legend";
    for (const [mark, colour, text] of keys) {
      const key = add(legend, "li");
      const style = add(key, "i", "", { class: mark }).style;
      style.color = colour.startsWith("#") ? colour : `var(--${colour})`;
      key.append(text);
    }
    const label = `${title.textContent}: ${keys.map(([, , text]) => text).join("; ")}.`;
    this.plot = document.createElement("div");
    this.plot.className = "plot";
    this.plot.id = `plot-${name}`;
    this.plot.style.height = `${height}px`;
    this.canvas = add(this.plot, "canvas", "", { role: "img", "aria-label": label });
    this.brush = add(this.plot, "div", "", { class: "brush", hidden: "" });
    this.tip = add(this.plot, "div", "", { class: "tip", hidden: "" });
    this.whole = add(this.plot, "button", "whole range", { type: "button", hidden: "" });
    title.after(legend, this.plot);
    x.charts.push(this);
    charts.push(this);
    this.listen();
  }

  zoom(from, to) {
    Object.assign(this.x, { from, to });
    this.x.charts.forEach((each) => each.redraw());
  }

  listen() {
    const { canvas, brush, x } = this;
    let since = null; // where a drag began
    const showWhole = () => this.zoom(x.low, x.high);
    this.whole.addEventListener("click", showWhole);
    canvas.addEventListener("dblclick", showWhole);
    canvas.addEventListener("pointerdown", (event) => {
      since = event.offsetX;
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", ({ offsetX, offsetY }) => {
      brush.hidden = since === null;
      brush.style.left = `${Math.min(since, offsetX)}px`;
      brush.style.width = `${Math.abs(offsetX - since)}px`;
      this.hover(offsetX, offsetY);
    });
    canvas.addEventListener("pointerup", ({ offsetX }) => {
      const [first, last] = [since, offsetX].sort((a, b) => a - b);
      if (since !== null && last - first > 4) {
        this.zoom(Math.max(x.low, this.xAt(first)), Math.min(x.high, this.xAt(last)));
      }
      since = null;
      brush.hidden = true;
    });
    canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
    new ResizeObserver(() => this.redraw()).observe(this.plot);
  }

  hover(left, top) {
    const { x, y, tip, width, height } = this;
    const isInside = left > LEFT && left < width - RIGHT && top > TOP && top < height - BOTTOM;
    const lines = isInside ? this.tell(this.xAt(left), this.yAt(top)) : null;
    tip.hidden = lines === null;
    tip.textContent = (lines ?? []).join("\n");
    tip.style.top = `${top + 14}px`;
    const isLeft = left <= width / 2;
    tip.style.left = isLeft ? `${left + 12}px` : "";
    tip.style.right = isLeft ? "" : `${width - left + 12}px`;
  }

  xAt(left) {
    const { from, to } = this.x;
    return from + ((left - LEFT) / (this.width - RIGHT - LEFT)) * (to - from);
  }

  yAt(top) { // of an axis that is not logarithmic
    const { from, to } = this.y;
    return to + ((top - TOP) / (this.height - BOTTOM - TOP)) * (from - to);
  }

  px(value) {
    const { from, to } = this.x;
    return LEFT + ((value - from) / (to - from)) * (this.width - RIGHT - LEFT);
  }

  py(value) {
    const scale = this.y.isLog ? Math.log : (each) => each;
    const [at, from, to] = [value, this.y.from, this.y.to].map(scale);
    return this.height - BOTTOM - ((at - from) / (to - from)) * (this.height - BOTTOM - TOP);
  }

  redraw() {
    const ratio = devicePixelRatio || 1;
    this.width = this.plot.clientWidth;
    this.canvas.width = this.width * ratio;
    this.canvas.height = this.height * ratio;
    const pen = this.canvas.getContext("2d");
    pen.scale(ratio, ratio);
    this.pen = pen;
    this.theme = isDark() && !printed.matches
      ? { ink: "#e4e7eb", grid: "#36414d", blue: SKY }
      : { ink: "#1f2933", grid: "#e2e6ea", blue: DEEP };
    this.whole.hidden = this.x.from === this.x.low && this.x.to === this.x.high;
    this.drawAxes();
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, TOP - 4, this.width - LEFT - RIGHT, this.height - TOP - BOTTOM + 8);
    pen.clip();
    this.draw(this);
    pen.restore();
  }

  drawAxes() {
    const { pen, x, y, width, height } = this;
    const write = (axis, value) => `${+(value / axis.size).toPrecision(6)}`;
    pen.font = "12px system-ui, sans-serif";
    pen.fillStyle = this.theme.ink;
    pen.textBaseline = "middle";
    pen.textAlign = "right";
    y.names?.forEach((name, at) => pen.fillText(name, LEFT - 8, this.py(at + 0.5)));
    for (const each of y.names ? [] : listTicks(y)) {
      pen.fillText(write(y, each), LEFT - 8, this.py(each));
      this.line([[x.from, each], [x.to, each]], "grid", "line", 1);
    }
    pen.textAlign = "center";
    const below = height - BOTTOM + 12;
    listTicks(x).forEach((each) => pen.fillText(write(x, each), this.px(each), below));
    pen.fillText(x.label, (LEFT + width - RIGHT) / 2, height - 9);
    pen.save();
    pen.translate(12, (TOP + height - BOTTOM) / 2);
    pen.rotate(-Math.PI / 2);
    pen.fillText(y.label, 0, 0);
    pen.restore();
  }

  trace(points) {
    this.pen.beginPath();
    for (const [x, y] of points) this.pen.lineTo(this.px(x), this.py(y));
  }

  line(points, colour, dash = "line", width = 1.5) {
    this.pen.strokeStyle = this.theme[colour] ?? colour;
    this.pen.lineWidth = width;
    this.pen.setLineDash(DASHES[dash]);
    this.trace(points);
    this.pen.stroke();
  }

  level(y) { this.line([[this.x.from, y], [this.x.to, y]], RED, "dashes", 2); }

  fill(points, colour) {
    this.pen.fillStyle = this.theme[colour] ?? colour;
    this.trace(points);
    this.pen.fill();
  }

  dots(points, colour, size) {
    this.pen.fillStyle = this.theme[colour] ?? colour;
    for (const [x, y] of points) {
      this.pen.beginPath();
      this.pen.arc(this.px(x), this.py(y), size, 0, 7);
      this.pen.fill();
    }
  }

  box(left, right, top, bottom, colour) { // whole pixels, at least one: neighbours touch
    const [first, last] = [left, right].map((each) => Math.round(this.px(each)));
    const [high, low] = [top, bottom].map((each) => Math.round(this.py(each)));
    this.pen.fillStyle = this.theme[colour] ?? colour;
    this.pen.fillRect(first, high, Math.max(last - first, 1), low - high);
  }
}
