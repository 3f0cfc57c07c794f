// Events: equal ones are one line, with their number, the first and the last time, and the latest traceback.

import { $, h } from "./dom.js";
import { clock, count } from "./format.js";

const MOST = 200; // lines

export class Events {
  // `on` has go(path).
  constructor(on) {
    this.on = on;
    this.groups = new Map();
    this.unread = 0;
  }

  get size() {
    return this.groups.size;
  }

  forget() {
    this.groups.clear();
    this.unread = 0;
  }

  add(event, shown) {
    const same = event.what === "restart" || event.what === "slow turn" ? "" : event.why;
    const key = JSON.stringify([event.what, event.actor, event.message, same, event.where]);
    const group = this.groups.get(key) ?? { number: 0, first: event.at };
    this.groups.delete(key); // the latest is the last
    this.groups.set(key, { ...group, number: group.number + 1, event });
    if (this.groups.size > MOST) this.groups.delete(this.groups.keys().next().value);
    if (!shown && event.what !== "restart") this.unread += 1;
  }

  // Draw the groups that match, the latest first; return their number.
  draw(text) {
    const found = [...this.groups.entries()].reverse().filter(([, { event }]) => !text || JSON.stringify(event).toLowerCase().includes(text));
    // What is unfolded stays as it is.
    const opened = new Set([...$("events").querySelectorAll("details[open]")].map((each) => each.dataset.key));
    const items = found.map(([key, { number, first, event }]) => {
      const times = number > 1 ? `${count(number)} × since ${clock(first)}` : "";
      const line = [
        h("time", {}, clock(event.at)), h("b", { class: event.what === "failure" ? "bad" : "" }, event.what), " ",
        event.actor ? h("button", { type: "button", class: "path", onclick: () => this.on.go(event.actor) }, event.actor) : null,
        ` ${[event.message, event.why, event.where].filter(Boolean).join(", ")} `, times ? h("span", { class: "times" }, times) : null,
      ];
      if (!event.traceback) return h("li", {}, ...line);
      const traceback = h("pre", { tabindex: 0, "aria-label": "Traceback" }, event.traceback.join("\n"));
      return h("li", {}, ...line, h("details", { open: opened.has(key), "data-key": key }, h("summary", {}, "Traceback"), traceback));
    });
    const none = text ? "nothing found" : "Dead letters, failures, restarts and slow turns appear here as they come.";
    $("events").replaceChildren(items.length ? h("ol", {}, ...items) : h("p", { class: "empty" }, none));
    return found.length;
  }
}
