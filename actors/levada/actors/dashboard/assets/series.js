// History since the page was opened: a bounded number of points that grow coarser with time, and charts of them.

import { h, svg } from "./dom.js";
import { seconds } from "./format.js";

const MOST = 720;
const DRAWN = 240;

export class Series {
  constructor() {
    this.times = [];
    this.values = [];
  }

  push(time, value) {
    if (value === null || value === undefined || !isFinite(value)) return;
    this.times.push(time);
    this.values.push(value);
    if (this.times.length > MOST) {
      // Of two neighbours the greater stays, so that no peak is lost.
      const { times, values } = this;
      this.times = times.filter((_, at) => at % 2);
      this.values = this.times.map((_, at) => Math.max(values[2 * at], values[2 * at + 1]));
    }
  }

  get last() {
    return this.values.length ? this.values[this.values.length - 1] : null;
  }
}

// A chart of one series. `draw` is called after each point.
export class Chart {
  constructor(label, format, { bad = false } = {}) {
    this.label = label;
    this.format = format;
    this.series = new Series();
    this.value = h("b");
    this.area = svg("path", { class: "area" });
    this.curve = svg("path", { class: "curve" });
    const base = svg("path", { class: "base", d: "M0 100H1000" });
    this.picture = svg("svg", { viewBox: "0 0 1000 100", preserveAspectRatio: "none", role: "img", "aria-label": label },
      base, svg("g", { class: bad ? "bad" : "" }, this.area, this.curve));
    this.least = h("span");
    this.most = h("span");
    this.element = h("figure", { class: "chart" },
      h("figcaption", {}, h("span", {}, label), this.value), this.picture, h("small", {}, this.least, this.most));
  }

  push(time, value) {
    this.series.push(time, value);
  }

  clear() {
    this.series = new Series();
    for (const path of [this.area, this.curve]) path.removeAttribute("d");
    this.least.textContent = this.most.textContent = "";
  }

  draw() {
    const { times, values, last } = this.series;
    this.value.textContent = last === null ? "–" : this.format(last);
    if (values.length < 2) return;
    const top = Math.max(...values) || 1;
    const begin = times[0];
    const span = times[times.length - 1] - begin || 1;
    const step = Math.max(1, Math.ceil(values.length / DRAWN));
    const points = [];
    for (let at = 0; at < values.length; at += step) {
      const value = step === 1 ? values[at] : Math.max(...values.slice(at, at + step));
      points.push(`${((1000 * (times[at] - begin)) / span).toFixed(1)} ${(98 - (96 * value) / top).toFixed(1)}`);
    }
    points.push(`1000 ${(98 - (96 * last) / top).toFixed(1)}`);
    const curve = `M${points.join("L")}`;
    this.curve.setAttribute("d", curve);
    this.area.setAttribute("d", `${curve}V100H0Z`);
    this.least.textContent = `${seconds(span)} ago`;
    this.most.textContent = `at most ${this.format(Math.max(...values))}`;
    this.picture.setAttribute("aria-label", `${this.label}: now ${this.format(last)}, at most ${this.format(Math.max(...values))}`);
  }
}

// The share of samples in a histogram of powers of two of a microsecond that changed since an earlier one.
export function quantile(now, before, share) {
  const counts = now.map((value, at) => value - (before ? before[at] : 0));
  let left = counts.reduce((sum, value) => sum + value, 0) * share;
  if (!(left > 0)) return null;
  let power = 0;
  while (power < 31 && left > counts[power]) left -= counts[power++];
  return 2 ** power * 1e-6;
}
