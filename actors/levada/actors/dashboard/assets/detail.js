// One actor: figures, charts, what it is tied to, and what may be done to it.

import { $, h } from "./dom.js";
import { count, rate, seconds } from "./format.js";
import { Chart } from "./charts.js";

const MOST = 300; // actors whose history is kept

const WORDS = {
  stop: "It handles the messages in its queue first.",
  kill: "What it does is cancelled, and the messages in its queue are lost.",
  restart: "What it does is cancelled, and its state starts over.",
};

export class Detail {
  // `on` has go(path), close(), act(members).
  constructor(on) {
    this.on = on;
    this.panel = $("detail");
    this.dialog = $("ask");
    this.histories = new Map();
    this.shown = null;
    this.dialog.addEventListener("close", () => this.before?.focus());
  }

  forget() {
    this.histories.clear();
  }

  note(time, row) {
    let charts = this.histories.get(row.path);
    if (charts) this.histories.delete(row.path);
    else {
      charts = [new Chart("handled per s", rate, { height: 84 }), new Chart("queue", count, { height: 84 }), new Chart("oldest message", seconds, { height: 84 })];
      if (this.histories.size >= MOST) this.histories.delete(this.histories.keys().next().value);
    }
    this.histories.set(row.path, charts);
    charts[0].push(time, row.rate);
    charts[1].push(time, row.depth);
    charts[2].push(time, row.age);
  }

  draw(path, row, actions) {
    this.panel.hidden = !path;
    if (!path) {
      this.shown = null;
      return;
    }
    if (this.shown !== path) this.build(path);
    this.facts.replaceChildren(...this.figures(row));
    const charts = row ? this.histories.get(row.path) : null;
    if (charts && this.charts.firstChild !== charts[0].element) this.charts.replaceChildren(...charts.map((chart) => chart.element));
    charts?.forEach((chart) => chart.draw());
    const lists = row ? [this.paths("Waits for", row.waits_for), this.paths("Linked to", row.links), this.channels(row.channels)] : [];
    const key = JSON.stringify(row ? [row.waits_for, row.links, row.channels] : []);
    if (key !== this.key) this.lists.replaceChildren(...lists.filter(Boolean));
    this.key = key;
    const allowed = row ? actions.filter((action) => action !== "restart" || row.supervision.startsWith("restart")) : [];
    if (allowed.join() !== this.allowed) {
      this.allowed = allowed.join();
      this.buttons.replaceChildren(...allowed.map((action) => h("button", {
        type: "button", class: "danger", onclick: () => this.on.act({ act: action, path }),
      }, `${action[0].toUpperCase()}${action.slice(1)}…`)));
    }
  }

  build(path) {
    this.shown = path;
    this.key = this.allowed = undefined;
    this.facts = h("dl");
    this.charts = h("div");
    this.lists = h("div");
    this.buttons = h("div", { class: "actions" });
    const close = h("button", { type: "button", class: "plain", "aria-label": "Close", onclick: () => this.on.close() }, "✕");
    this.panel.replaceChildren(h("div", { class: "top" }, h("h2", {}, path), close), this.facts, this.charts, this.lists, this.buttons);
  }

  figures(row) {
    const fact = (name, value, style) => (value ? [h("dt", {}, name), h("dd", { class: style }, value)] : []);
    if (!row) return fact("state", "it has ended, or is not there yet", "quiet");
    return [
      ...fact("class", row.kind.replace(/^_+/, "")),
      ...fact("state", row.state, row.state),
      ...fact("about", row.about),
      ...fact("mailbox", `${count(row.depth)}${row.capacity === null ? "" : ` of ${count(row.capacity)}`}${row.age ? `, the oldest for ${seconds(row.age)}` : ""}`),
      ...fact("wait ≈", seconds(row.wait)),
      ...fact("handled", `${count(row.handled)}${row.rate === null ? "" : `, ${rate(row.rate)} per s`}`),
      ...fact("children", row.hidden ? count(row.hidden) : ""),
      ...fact("supervision", row.supervision),
      ...fact("restarts", row.restarts ? count(row.restarts) : ""),
      ...fact("in", [row.handler, row.where].filter(Boolean).join(" "), "mono"),
      ...fact("watchers", row.watchers ? count(row.watchers) : ""),
    ];
  }

  paths(title, paths) {
    if (!paths.length) return null;
    const items = paths.map((path) => h("li", {}, h("button", { type: "button", class: "path", onclick: () => this.on.go(path) }, path)));
    return h("div", {}, h("h3", {}, title), h("ul", {}, ...items));
  }

  channels(channels) {
    if (!channels.length) return null;
    const items = channels.map((each) => h("li", {}, `${each.end} ${each.name}: ${each.item}, ${each.mode}, ${count(each.queued)} of ${count(each.window)} queued`));
    return h("div", {}, h("h3", {}, "Channels"), h("ul", {}, ...items));
  }

  // The program answers an action with a code, or with a refusal; then it was carried out.
  answered(answer) {
    if (answer.refused) this.tell("Not done", answer.refused);
    else if (answer.confirm) this.first(answer);
    else this.dialog.close();
  }

  first({ confirm, act, path, supervision }) {
    const name = `${act[0].toUpperCase()}${act.slice(1)}`;
    const text = `${WORDS[act]} Its supervision is: ${supervision}.`;
    this.show(`${name} ${path}?`, text, "Cancel", [`${name}…`, () => {
      const second = "This is the second question: it cannot be undone.";
      this.show(`Really ${act} ${path}?`, second, "No", [`Yes, ${act} it`, () => this.on.act({ confirm })]);
    }]);
  }

  tell(title, text) {
    this.show(title, text, "Close", null);
  }

  show(title, text, no, yes) {
    const cancel = h("button", { type: "button", autofocus: true, onclick: () => this.dialog.close() }, no);
    const go = yes && h("button", { type: "button", class: "danger", onclick: yes[1] }, yes[0]);
    this.dialog.replaceChildren(h("h2", { id: "ask-title" }, title), h("p", {}, text), h("div", { class: "actions" }, cancel, go));
    if (!this.dialog.open) {
      this.before = document.activeElement;
      this.dialog.showModal();
    }
    cancel.focus();
  }
}
