// The overview: what is wrong, the nodes with their load, and charts of the program.

import { $, h } from "./dom.js";
import { count, octets, percent, rate, seconds } from "./format.js";
import { Chart, quantile, range } from "./charts.js";

const charts = {
  handled: new Chart("messages handled per s", rate),
  bad: new Chart("failures, dead letters per s", rate, { bad: true }),
  cpu: new Chart("CPU of the process", percent),
  memory: new Chart("memory of the process", octets),
  stall: new Chart("longest stall of the event loop", seconds),
  collecting: new Chart("time in garbage collection", percent),
  wait: new Chart("wait for a turn, 99 %", seconds),
  turn: new Chart("a turn takes, 99 %", seconds),
  actors: new Chart("actors", count),
  waiting: new Chart("handlers that wait", count),
};

export class Overview {
  // `on` has go(path), page(name), visit(node).
  constructor(on) {
    this.on = on;
    this.shift = null; // from the program's clock to ours
    this.loads = new Map();
    $("plots").append(...Object.values(charts).map((chart) => chart.element));
  }

  forget() {
    this.shift = null;
    range.begin = 0;
    this.loads.clear();
    Object.values(charts).forEach((chart) => chart.clear());
    $("troubles").replaceChildren();
    $("nodes").replaceChildren();
  }

  // The last 15 minutes, as the program has kept them.
  past(view) {
    this.align(view);
    Object.values(charts).forEach((chart) => chart.clear());
    for (const row of view.history.rows) {
      for (const [name, chart] of Object.entries(charts)) chart.push(row.time + this.shift, row[name]);
    }
  }

  align(view) {
    this.shift ??= Date.now() / 1000 - view.time;
    range.begin = Math.min(range.begin || Infinity, (view.history?.rows[0]?.time ?? view.time) + this.shift);
  }

  chart(view, before) {
    this.align(view);
    const time = view.time + this.shift;
    range.end = time;
    const push = (name, value) => charts[name].push(time, value);
    push("actors", view.statistics.actors);
    push("waiting", view.statistics.waiting);
    push("memory", view.memory);
    push("handled", view.handled_rate);
    if (before && view.time > before.time) {
      const span = view.time - before.time;
      const bad = ({ statistics }) => statistics.failures + statistics.dead_letters;
      push("cpu", (100 * (view.cpu - before.cpu)) / span);
      push("collecting", (100 * (view.collection_seconds - before.collection_seconds)) / span);
      push("wait", quantile(view.queue_times, before.queue_times, 0.99) ?? 0);
      push("turn", quantile(view.turn_times, before.turn_times, 0.99)); // none: no turn was measured
      push("stall", Math.max(0, ...(view.stalls ?? []).filter(([ended]) => ended > before.time).map(([, took]) => took)));
      push("bad", Math.max(0, bad(view) - bad(before)) / span);
    }
    Object.values(charts).forEach((chart) => chart.draw());
  }

  draw(view) {
    this.troubles(view.troubles, view.searching);
    this.nodes(view.nodes, view.time);
  }

  troubles(troubles, searching) {
    const key = JSON.stringify(troubles);
    if (key === this.key || searching) return;
    this.key = key;
    const items = troubles.map(({ text, actor, page, node }) => {
      const begins = actor && text.startsWith(actor);
      const rest = begins ? text.slice(actor.length) : text;
      const link = begins ? h("button", { type: "button", class: "path", onclick: () => this.on.go(actor, node) }, (node ?? "") + actor) : null;
      const more = page ? h("button", { type: "button", class: "path", onclick: () => this.on.page(page, node) }, `Show ${page}`) : null;
      return h("li", {}, link ? null : node ? `${node}: ` : null, link, rest, more ? " " : null, more);
    });
    const all = h("p", { class: "fine" }, "Nothing is wrong: no mailbox grows, no actor restarts again and again, and the event loop is not held up.");
    $("troubles").replaceChildren(items.length ? h("ul", {}, ...items) : all);
  }

  nodes(nodes, time) {
    $("nodes").hidden = !nodes.length;
    const cards = nodes.map((node) => {
      const last = this.loads.get(node.name);
      const load = last && node.cpu >= last.cpu && time > last.time ? (100 * (node.cpu - last.cpu)) / (time - last.time) : null;
      if (node.cpu !== undefined) this.loads.set(node.name, { cpu: node.cpu, time });
      const figures = node.statistics
        ? [load === null ? "" : `${percent(load)} CPU`, `${count(node.statistics.actors)} actors`, node.statistics.failures ? `${count(node.statistics.failures)} failures` : ""]
        : [node.error];
      return h("li", {}, h("button", { type: "button", onclick: () => this.on.visit(node) },
        h("b", {}, node.name), " ", h("span", { class: node.state }, node.state), h("span", { class: "quiet" }, figures.filter(Boolean).join(" · ")),
        h("meter", { min: 0, max: 100, high: 80, value: load ?? 0, "aria-label": `CPU of ${node.name}` })));
    });
    const focused = [...$("nodes").querySelectorAll("button")].indexOf(document.activeElement);
    $("nodes").replaceChildren(h("ul", {}, ...cards));
    if (focused >= 0) $("nodes").querySelectorAll("button")[focused]?.focus();
  }
}
