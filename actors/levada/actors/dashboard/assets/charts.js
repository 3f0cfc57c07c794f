// Charts: uPlot draws them; here are the series, the captions, and one time axis for all.

import { h } from "./dom.js";
import { clock } from "./format.js";

const MOST = 720;
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export class Series {
  constructor() {
    this.times = [];
    this.values = [];
  }

  push(time, value) {
    if (value === null || value === undefined || !isFinite(value)) return;
    if (this.times.length && time <= this.times.at(-1)) return;
    this.times.push(time);
    this.values.push(value);
    if (this.times.length > MOST) {
      // Of two neighbours the greater stays, so that no peak is lost.
      const { times, values } = this;
      this.times = times.filter((_, at) => at % 2);
      this.values = this.times.map((_, at) => Math.max(values[2 * at], values[2 * at + 1]));
    }
  }
}

// What all charts show: the last seconds, as far as there are figures, or a part that was dragged over.
export const range = { seconds: 900, from: null, to: null, begin: 0, end: 0 };
const drawn = new Set();

export function zoom(from, to) {
  range.from = from;
  range.to = to;
  drawn.forEach((chart) => chart.draw());
}

const bounds = () => (range.from === null ? [Math.max(range.end - range.seconds, Math.min(range.begin, range.end - 60)), range.end] : [range.from, range.to]);

// A chart of one series; `bad`: its line is red while it is not zero. `draw` is called after each point.
export class Chart {
  constructor(label, format, { bad = false, height = 104 } = {}) {
    Object.assign(this, { label, format, bad, height, series: new Series(), plot: null });
    this.value = h("b");
    this.room = h("div", { class: "plot", role: "img", "aria-label": label });
    this.element = h("figure", { class: "chart" }, h("figcaption", {}, h("span", {}, label), this.value), this.room);
    new ResizeObserver(() => this.resized()).observe(this.room);
  }

  push(time, value) {
    this.series.push(time, value);
  }

  clear() {
    this.series = new Series();
  }

  resized() {
    const width = this.room.clientWidth;
    if (!width) {
      drawn.delete(this);
      return;
    }
    drawn.add(this);
    if (this.plot) this.plot.setSize({ width, height: this.height });
    else this.begin(width);
    this.draw();
  }

  begin(width) {
    this.room.addEventListener("dblclick", () => zoom(null, null));
    const axis = { stroke: () => style("--quiet"), font: `11px ${style("--font")}`, grid: { stroke: () => style("--line"), width: 1 }, ticks: { show: false } };
    const ink = () => style(this.bad && this.most ? "--bad" : "--accent");
    this.plot = new uPlot({
      width,
      height: this.height,
      padding: [8, 8, 0, 0],
      legend: { show: false },
      cursor: { sync: { key: "levada" }, y: false, drag: { x: true, y: false, setScale: false } },
      scales: { x: { range: bounds }, y: { range: (_, __, most) => [0, most > 0 ? most * 1.08 : 1] } },
      axes: [
        { ...axis, size: 22, gap: 2, space: 70, values: (_, ticks) => ticks.map((tick) => clock(tick).slice(0, bounds()[1] - bounds()[0] > 300 ? 5 : 8)) },
        { ...axis, size: 52, gap: 4, space: 28, values: (_, ticks) => ticks.map((tick) => this.format(tick)) },
      ],
      series: [{}, { stroke: ink, width: 1.5, fill: () => `${ink()}22`, points: { show: false } }],
      hooks: {
        setCursor: [() => this.caption()],
        setSelect: [({ select, posToVal }) => {
          if (select.width > 4) zoom(posToVal(select.left, "x"), posToVal(select.left + select.width, "x"));
          this.plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
        }],
      },
    }, [[], []], this.room);
  }

  draw() {
    const { times, values } = this.series;
    const [from, to] = bounds();
    const shown = values.filter((_, at) => times[at] >= from && times[at] <= to);
    this.most = Math.max(0, ...shown);
    if (drawn.has(this)) this.plot?.setData([times, values]);
    this.caption();
    const last = values.length ? this.format(values.at(-1)) : "no figures yet";
    this.room.setAttribute("aria-label", `${this.label}: now ${last}, at most ${this.format(this.most)}`);
  }

  // The value under the pointer, or else the last one.
  caption() {
    const { times, values } = this.series;
    const at = this.plot?.cursor.idx;
    const hovered = at !== null && at !== undefined && this.plot.cursor.left >= 0 && values[at] !== undefined;
    const text = hovered ? `${this.format(values[at])} at ${clock(times[at])}` : values.length ? this.format(values.at(-1)) : "–";
    if (this.value.textContent !== text) this.value.textContent = text;
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
