// The dashboard: it logs in, says what is in view, and draws what comes.

import { $, h, say } from "./dom.js";
import { clock, count, percent, rate, seconds } from "./format.js";
import { Detail } from "./detail.js";
import { Grid } from "./grid.js";
import { NONE, PAGES } from "./pages.js";
import { Chart, quantile } from "./series.js";

const EVENTS = 500;
const OPEN = 500; // actors unfolded
const OPEN_BYTES = 50_000; // of their paths; a request has 65,536
const narrow = matchMedia("(max-width: 900px)");

const state = { page: "actors", node: "", open: new Set(), selected: null, search: "", searching: false, unread: 0, begun: false };
const rates = new Map(); // the last count of each thing, for what changes per second
const events = [];
const turned = []; // times and counts of turns, of the last seconds
let socket = null;
let sent = "";
let before = null; // the last view that came
let delay = 1;

const grid = new Grid({
  view: () => tell(),
  choose: (row) => (state.page === "nodes" ? visit(row) : select(row.path)),
  fold: (row, open) => fold(row.path, open),
  close: () => select(null),
});
const detail = new Detail({ go: (path) => { show("actors"); select(path); }, close: () => { select(null); $("grid").focus(); }, act: (members) => send(state.node ? { ...members, node: state.node } : members) });

const charts = {
  cpu: new Chart("CPU of the process", percent),
  turns: new Chart("turns of actors per s", rate),
  wait: new Chart("wait for a turn, 99 %", seconds),
  turn: new Chart("a turn takes, 99 %", seconds),
  stall: new Chart("longest stall of the event loop", seconds),
  actors: new Chart("actors", count),
  waiting: new Chart("handlers that wait", count),
  bad: new Chart("failures, dead letters per s", rate, { bad: true }),
};
$("charts").append(...Object.values(charts).map((chart) => chart.element));

// --- the connection

async function begin() {
  const token = new URLSearchParams(location.hash.slice(1)).get("token");
  if (token) {
    // The token is good for one login; it leaves the address bar and the history at once.
    history.replaceState(null, "", location.pathname);
    const answer = await fetch("/login", { method: "POST", body: JSON.stringify({ token }) });
    if (!answer.ok) warn((await answer.text()).trim());
  }
  fromAddress();
  connect();
}

function connect() {
  socket = new WebSocket(`${location.protocol === "https:" ? "wss" : "ws"}://${location.host}/socket`);
  socket.binaryType = "arraybuffer";
  const decoder = new TextDecoder();
  socket.onopen = () => { sent = ""; delay = 1; tell(); };
  socket.onmessage = ({ data }) => {
    const message = JSON.parse(decoder.decode(data));
    if (message.view) take(message.view);
    else if (message.answer) detail.answered(message.answer);
    else if (message.gone) gone(message.gone);
  };
  socket.onclose = lost;
}

async function lost() {
  link("gone", "not connected");
  let answer = null;
  try { answer = await fetch("/login", { cache: "no-store" }); } catch { /* it is not there */ }
  if (answer === null) warn("The dashboard does not answer: its program has ended, or starts again. This page keeps trying.");
  else if (answer.status === 401) warn("This browser is not logged in: open the address that the program prints.");
  else warn("The dashboard closed the connection; perhaps too many browsers are looking. This page keeps trying.");
  setTimeout(connect, 1000 * delay);
  delay = Math.min(5, delay * 1.5);
}

function gone(why) {
  link("gone", "program gone");
  warn(`${why}\nThis page waits for the program to come back.`);
  before = null;
}

function send(members) {
  if (socket?.readyState === WebSocket.OPEN) socket.send(JSON.stringify(members));
}

// Say what is in view, if that has changed.
function tell() {
  const idle = document.hidden || !(state.page in PAGES);
  const { first, count } = grid.wanted();
  const view = {
    page: idle ? "none" : state.page, node: state.node, search: state.page === "events" ? "" : state.search, open: [...state.open],
    first: idle ? 0 : first, count: idle ? 0 : count, selected: document.hidden ? null : state.selected,
  };
  const text = JSON.stringify(view);
  if (text !== sent && socket?.readyState === WebSocket.OPEN) {
    sent = text;
    send({ view });
  }
}

// --- what comes

function take(view) {
  if ((view.node ?? "") !== state.node) return; // of the node that was in view before
  if (view.away) {
    link("gone", "node gone");
    warn(`${view.away}\nThis page waits for the node to come back.`);
    return;
  }
  link("live", "live");
  const again = state.pid !== undefined && state.pid !== view.pid;
  if (again) {
    forget();
    add({ what: "program", actor: "", why: `started again as process ${view.pid}`, at: Date.now() / 1000 });
    news(`The program was started again at ${clock(Date.now() / 1000)}, as process ${view.pid}.`);
  } else if ($("banner").className === "") hush();
  state.pid = view.pid;
  say($("system"), view.system);
  document.title = `${view.system} · levada`;
  say($("program"), `process ${view.pid}, ${view.phase}`);
  chart(view);
  view.news.forEach(add);
  if (view.news.length || again) drawEvents();
  for (const row of view.rows) enrich(view.time, view.page, row);
  if (view.detail) {
    view.detail.rate = per(`${view.detail.path} detail`, view.time, view.detail.handled);
    waits(view.detail);
    detail.note(view.time, view.detail);
  }
  detail.draw(state.selected, view.detail, view.actions);
  if (view.page === state.page) {
    if (!state.begun && view.page === "actors") unfold(view);
    grid.update(view, state);
    const more = view.capped ? " or more" : "";
    const found = view.total ? `${count(view.total)}${more} ${view.total === 1 ? "row" : "rows"}` : state.search ? NONE.found : NONE[view.page];
    say($("count"), view.searching ? `searching, ${count(view.total)} so far` : found);
  }
  before = view;
  tell();
}

function forget() {
  rates.clear();
  turned.length = 0;
  detail.forget();
  before = null;
}

// A small program is shown whole at first.
function unfold(view) {
  state.begun = true;
  if (view.total <= 30) view.rows.filter((row) => row.hidden && row.hidden <= 20).forEach((row) => state.open.add(row.path));
}

function per(key, time, value) {
  const last = rates.get(key);
  if (last && time - last.time < 0.05) return last.rate;
  const now = { time, value, rate: last && value >= last.value ? (value - last.value) / (time - last.time) : null };
  rates.delete(key);
  rates.set(key, now);
  if (rates.size > 5000) rates.delete(rates.keys().next().value);
  return now.rate;
}

function waits(row) {
  row.wait = row.depth && row.rate ? row.depth / row.rate : null;
}

function enrich(time, page, row) {
  if (page === "actors") {
    row.rate = per(row.path, time, row.handled);
    waits(row);
    if (row.path !== state.selected) detail.note(time, row);
  } else if (page === "connections" && row.report?.bytes_sent !== undefined) {
    row.sent = per(`${row.path} sent`, time, row.report.bytes_sent);
    row.received = per(`${row.path} received`, time, row.report.bytes_received);
  } else if (page === "journals" && row.report) row.appended = per(`${row.path} appended`, time, row.report.rows_appended);
}

function chart(view) {
  const { statistics } = view;
  charts.actors.push(view.time, statistics.actors);
  charts.waiting.push(view.time, statistics.waiting);
  if (before && view.time > before.time) {
    const span = view.time - before.time;
    const bad = (each) => each.statistics.failures + each.statistics.dead_letters;
    charts.cpu.push(view.time, (100 * (view.cpu - before.cpu)) / span);
    // Of short turns one in 63 is measured, so a few seconds are taken together.
    const turns = view.turn_times.reduce((sum, value) => sum + value, 0);
    turned.push([view.time, turns]);
    if (turned.length > 10) turned.shift();
    const [time, first] = turned[0];
    if (view.time > time) charts.turns.push(view.time, (turns - first) / (view.time - time));
    charts.wait.push(view.time, quantile(view.queue_times, before.queue_times, 0.99) ?? 0);
    charts.turn.push(view.time, quantile(view.turn_times, before.turn_times, 0.99)); // none: no turn was measured
    charts.stall.push(view.time, Math.max(0, ...(view.stalls ?? []).filter(([ended]) => ended > before.time).map(([, took]) => took)));
    charts.bad.push(view.time, Math.max(0, bad(view) - bad(before)) / span);
  }
  Object.values(charts).forEach((each) => each.draw());
}

function add(event) {
  events.unshift(event);
  events.length = Math.min(events.length, EVENTS);
  if (state.page !== "events" && event.what !== "restart") state.unread += 1;
}

function drawEvents() {
  navigation();
  if (state.page !== "events") return;
  const text = state.search.toLowerCase();
  const found = events.filter((event) => !text || JSON.stringify(event).toLowerCase().includes(text));
  const items = found.map((event) => {
    const line = [
      h("time", {}, clock(event.at)), h("b", { class: event.what === "failure" ? "bad" : "" }, event.what), " ",
      event.actor ? h("button", { type: "button", class: "path", onclick: () => { show("actors"); select(event.actor); } }, event.actor) : null,
      ` ${[event.message, event.why].filter(Boolean).join(", ")}`,
    ];
    if (!event.traceback) return h("li", {}, ...line);
    return h("li", {}, h("details", {}, h("summary", {}, ...line), h("pre", {}, event.traceback.join("\n"))));
  });
  // What is unfolded stays as it is: new events go above it.
  const list = $("events").querySelector("ol");
  const opened = new Set([...(list?.querySelectorAll("details[open]") ?? [])].map((each) => each.textContent));
  items.forEach((item) => { if (opened.has(item.firstChild?.textContent)) item.firstChild.open = true; });
  $("events").replaceChildren(items.length ? h("ol", {}, ...items) : h("p", { class: "empty" }, text ? NONE.found : "Dead letters, failures, restarts and slow turns appear here as they come."));
  say($("count"), events.length ? `${count(found.length)} ${found.length === 1 ? "event" : "events"}` : "");
}

// --- what the user does

// Look at a node of the program, or at the program itself.
function enter(node) {
  if (node === state.node) return;
  state.node = node;
  state.pid = undefined;
  state.selected = null;
  state.begun = false;
  state.open.clear();
  state.unread = events.length = 0;
  forget();
  Object.values(charts).forEach((each) => each.clear());
  detail.draw(null, null, []);
  $("node").hidden = !node;
  say($("node"), `node ${node} ✕`);
  $("node").setAttribute("aria-label", `Leave node ${node}`);
}

function visit({ name, state: of }) {
  if (of !== "up" && of !== "draining") return;
  enter(name);
  show("actors");
}

function show(page) {
  if (page === "nodes") enter(""); // the program knows them
  if (page === state.page && grid.columns.length) return;
  state.page = page;
  if (page === "events") state.unread = 0;
  $("grid").hidden = page === "events";
  $("events").hidden = page !== "events";
  say($("count"), "");
  columns();
  drawEvents();
  navigation();
  address();
  tell();
}

function columns() {
  const page = PAGES[state.page];
  if (!page) return;
  const all = page.columns(state);
  grid.setColumns(page.label, narrow.matches ? page.narrow.map((at) => all[at]) : all, page.tree && !state.search);
}

function select(path) {
  state.selected = path;
  detail.draw(path, before?.detail?.path === path ? before.detail : null, []);
  grid.selected = path;
  grid.draw();
  address();
  tell();
}

function fold(path, open) {
  state.open.delete(path);
  if (open) state.open.add(path);
  // The program takes no more. What was unfolded first, and has perhaps ended long since, is folded instead.
  while (state.open.size > OPEN || encoded([...state.open]) > OPEN_BYTES) {
    state.open.delete([...state.open].find((each) => !`${path}/`.startsWith(`${each}/`)) ?? path);
  }
  tell();
}

// The bytes of a value as JSON that a console takes: other characters are escaped.
const encoded = (value) => JSON.stringify(value).replace(/[^ -~]/g, "\\u0000").length;

function address() {
  // A name may have half a surrogate pair, which no address can show.
  const selected = (state.selected ?? "").toWellFormed();
  const hash = `#${state.page}${state.node ? `@${encodeURIComponent(state.node)}` : ""}${selected ? `:${encodeURI(selected)}` : ""}`;
  if (location.hash !== hash) history.replaceState(null, "", hash);
}

function fromAddress() {
  const [place, ...path] = location.hash.slice(1).split(":");
  const [page, node = ""] = place.split("@");
  let selected = null;
  try {
    enter(decodeURIComponent(node));
    selected = path.length ? decodeURI(path.join(":")) : null;
  } catch { /* not an address of ours */ }
  state.selected = selected;
  state.page = "";
  show(page in PAGES || page === "events" ? page : "actors");
  select(selected);
}

function navigation() {
  const links = [...Object.entries(PAGES).map(([name, page]) => [name, page.label]), ["events", "Events"]].map(([name, label]) => {
    const badge = name === "events" && state.unread ? h("span", { class: "badge", "aria-label": `${state.unread} new` }, state.unread > 99 ? "99+" : String(state.unread)) : null;
    return h("a", { href: `#${name}`, id: `page-${name}`, "aria-current": state.page === name ? "page" : null, onclick: (event) => { event.preventDefault(); show(name); } }, label, badge);
  });
  const focused = document.activeElement?.id;
  $("pages").replaceChildren(...links);
  $("pages").querySelector("[aria-current]")?.scrollIntoView({ block: "nearest", inline: "nearest" });
  if (focused?.startsWith("page-")) $(focused)?.focus();
}

function link(style, text) {
  $("link").className = `pill ${style}`;
  say($("link"), text);
}

function warn(text) {
  $("banner").className = "";
  $("banner").hidden = false;
  say($("banner"), text);
}

function news(text) {
  warn(text);
  $("banner").className = "news";
  setTimeout(() => { if ($("banner").textContent === text) hush(); }, 30_000);
}

function hush() {
  $("banner").hidden = true;
}

const THEMES = ["auto", "dark", "light"];
function theme(name) {
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  say($("theme"), `Theme: ${name}`);
  localStorage.setItem("levada-theme", name);
}
const stored = localStorage.getItem("levada-theme");
theme(THEMES.includes(stored) ? stored : "auto");
$("theme").addEventListener("click", () => theme(THEMES[(THEMES.indexOf(localStorage.getItem("levada-theme")) + 1) % 3]));

$("node").addEventListener("click", () => show("nodes"));

$("search").addEventListener("input", () => {
  const searched = Boolean(state.search);
  state.search = $("search").value;
  state.searching = Boolean(state.search);
  if (searched !== state.searching) columns();
  else if (state.page !== "events") $("grid").scrollTop = 0;
  if (state.page === "events") drawEvents();
  tell();
});
addEventListener("keydown", (event) => {
  if (event.key === "/" && !/^(INPUT|TEXTAREA)$/.test(document.activeElement?.tagName ?? "")) {
    event.preventDefault();
    $("search").focus();
  } else if (event.key === "Escape" && document.activeElement === $("search")) $("grid").focus();
});
addEventListener("hashchange", () => (location.hash.startsWith("#token=") ? begin() : fromAddress()));
addEventListener("visibilitychange", tell);
narrow.addEventListener("change", () => { columns(); tell(); });

begin();
