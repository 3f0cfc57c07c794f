// The dashboard: it logs in, says what is in view, and draws what comes.

import { $, h, say } from "./dom.js";
import { clock, count } from "./format.js";
import { range, zoom } from "./charts.js";
import { Detail } from "./detail.js";
import { Events } from "./events.js";
import { picture } from "./flow.js";
import { Grid } from "./grid.js";
import { Overview } from "./overview.js";
import { NONE, PAGES } from "./pages.js";

const SORTED = 200; // rows that this page sorts itself; a program sends no more
const OPEN = 500; // actors unfolded
const OPEN_BYTES = 50_000; // of their paths; a request has 65,536
const narrow = matchMedia("(max-width: 900px)");

const state = { page: "overview", node: "", open: new Set(), selected: null, search: "", tree: false, internals: false, past: false, begun: false };
const orders = new Map([["overview", { label: "queue", key: "queue", descending: true }]]); // by page
const rates = new Map(); // the last count of each thing, for what changes per second
let socket = null;
let sent = "";
let pages = ["overview", "actors"]; // that have content
let before = null; // the last view that came
let delay = 1;

const grid = new Grid({
  view: () => tell(),
  choose: (row) => (state.page === "flow" ? undefined : state.page === "nodes" ? visit(row) : reveal(row.path, row.node)),
  fold: (row, open) => fold(row.path, open),
  close: () => select(null),
  sort: (column) => sort(column),
});
// Show an actor; an actor of a node on the pages of that node.
function reveal(path, node) {
  if (node) {
    enter(node);
    show("actors");
  }
  select(path);
}
const onActors = (path) => { show("actors"); select(path); };
const detail = new Detail({ go: onActors, close: () => { select(null); $("grid").focus(); }, act: (members) => send(state.node ? { ...members, node: state.node } : members) });
const events = new Events({ go: onActors });
const overview = new Overview({ go: reveal, page: (page, node) => { if (node) enter(node); show(page); }, visit });

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
  socket.onopen = () => { sent = ""; delay = 1; state.past = false; tell(); };
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
  const order = orders.get(state.page);
  const whole = (state.page === "overview" && pages.includes("nodes")) || (order && !PAGES[state.page]?.served);
  const { first, count } = whole ? { first: 0, count: SORTED } : grid.wanted();
  const view = {
    page: idle ? "none" : state.page, node: state.node, search: state.page === "events" ? "" : state.search, open: [...state.open],
    first: idle ? 0 : first, count: idle ? 0 : count, selected: document.hidden ? null : state.selected,
    sort: order?.key ? `${order.descending ? "-" : ""}${order.key}` : "", internals: state.internals, history: !state.past,
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
    events.add({ what: "program", actor: "", why: `started again as process ${view.pid}`, at: Date.now() / 1000 }, state.page === "events");
    news(`The program was started again at ${clock(Date.now() / 1000)}, as process ${view.pid}.`);
  } else if ($("banner").className === "") hush();
  state.pid = view.pid;
  say($("system"), view.system);
  document.title = `${view.system} · levada`;
  say($("program"), `process ${view.pid}, ${view.phase}`);
  if (view.history) {
    state.past = true;
    overview.past(view);
    events.forget(); // they begin with those of the past
    view.history.events.forEach((event) => events.add(event, true));
  }
  overview.chart(view, before);
  view.news.forEach((event) => events.add(event, state.page === "events"));
  if (view.news.length || again || view.pages?.join() !== before?.pages?.join()) {
    pages = view.pages ?? Object.keys(PAGES); // an older program does not say
    place();
    drawEvents();
  }
  if (view.troubles) overview.draw(view);
  for (const row of view.rows) enrich(view.time, view.page, row);
  if (view.detail) {
    view.detail.rate = per(`${view.detail.path} detail`, view.time, view.detail.handled);
    waits(view.detail);
    detail.note(view.time + overview.shift, view.detail);
  }
  detail.draw(state.selected, view.detail, view.actions);
  if (view.page === state.page) {
    if (!state.begun && view.page === "actors" && state.tree) unfold(view);
    const whole = view.total;
    arrange(view);
    grid.update(view, state);
    if (view.page === "flow") $("flow").replaceChildren(picture(view.rows, reveal));
    const more = view.capped ? " or more" : whole > view.total ? ` of ${count(whole)}, sorted` : "";
    const found = view.total ? `${count(view.total)}${more} ${view.total === 1 ? "row" : "rows"}` : state.search ? NONE.found : NONE[view.page];
    say($("count"), view.searching ? `searching, ${count(view.total)} so far` : found);
  }
  before = view;
  tell();
}

// Sort the rows here, if the program does not.
function arrange(view) {
  const order = orders.get(view.page);
  const merged = view.rows.some((row) => row.node); // each node has sorted its own
  if (!order || (PAGES[view.page].served && !merged)) return;
  const { raw } = PAGES[view.page].columns(state).find((column) => column.label === order.label);
  const value = (row) => raw(row) ?? "";
  const compare = (one, two) => (typeof one === "number" && typeof two === "number" ? one - two : String(one).localeCompare(String(two), "en", { numeric: true }));
  view.rows.sort((one, two) => (order.descending ? -1 : 1) * compare(value(one), value(two)));
  view.total = view.rows.length;
}

function forget() {
  rates.clear();
  overview.forget();
  state.past = false;
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
  if (page === "actors" || page === "overview") {
    row.rate = per(`${row.node ?? ""}${row.path}`, time, row.handled);
    waits(row);
    if (row.path !== state.selected && !row.node) detail.note(time + overview.shift, row);
  } else if (page === "connections" && row.report?.bytes_sent !== undefined) {
    row.sent = per(`${row.path} sent`, time, row.report.bytes_sent);
    row.received = per(`${row.path} received`, time, row.report.bytes_received);
  } else if (page === "journals" && row.report) row.appended = per(`${row.path} appended`, time, row.report.rows_appended);
}

function drawEvents() {
  navigation();
  if (state.page !== "events") return;
  const found = events.draw(state.search.toLowerCase());
  say($("count"), events.size ? `${count(found)} ${found === 1 ? "kind of event" : "kinds of events"}` : "");
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
  events.forget();
  forget();
  detail.draw(null, null, []);
  place();
}

// Name the node in view; or say that the rows are the driver's alone, where that can be missed.
function place() {
  const driver = !state.node && pages.includes("nodes") && state.page !== "overview" && state.page !== "nodes";
  $("node").hidden = !state.node && !driver;
  say($("node"), state.node ? `node ${state.node} ✕` : "driver only, see nodes");
  $("node").setAttribute("aria-label", state.node ? `Leave node ${state.node}` : "These rows are of the driver only: choose a node");
}

function visit({ name, state: of }) {
  if (of !== "up" && of !== "draining") return;
  enter(name);
  show("overview");
}

function show(page) {
  if (page === "nodes") enter(""); // the program knows them
  if (page === state.page && grid.columns.length) return;
  state.page = page;
  document.body.dataset.page = page;
  if (page === "events") events.unread = 0;
  $("grid").hidden = page === "events";
  $("events").hidden = page !== "events";
  say($("count"), "");
  columns();
  place();
  drawEvents();
  navigation();
  address();
  tell();
}

function columns() {
  const page = PAGES[state.page];
  if (!page) return;
  state.tree = Boolean(page.tree && !state.search && !orders.get(state.page));
  const all = page.columns(state);
  grid.setColumns(page.label, narrow.matches ? page.narrow.map((at) => all[at]) : all, state.tree);
  grid.mark(orders.get(state.page));
}

// Sort by a column: a figure greatest first, a text least first, then the other way, and then not at all.
function sort({ label, key, number }) {
  const order = orders.get(state.page);
  const first = Boolean(number);
  if (order?.label !== label) orders.set(state.page, { label, key, descending: first });
  else if (order.descending === first) orders.set(state.page, { label, key, descending: !first });
  else orders.delete(state.page);
  columns();
  tell();
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
  show(page in PAGES || page === "events" ? page : "overview");
  select(selected);
}

function navigation() {
  // A page without content has no tab, unless it is the page in view.
  const shown = Object.entries(PAGES).filter(([name]) => pages.includes(name) || name === state.page).map(([name, page]) => [name, page.label]);
  if (events.size || state.page === "events") shown.push(["events", "Events"]);
  const links = shown.map(([name, label]) => {
    const { unread } = events;
    const badge = name === "events" && unread ? h("span", { class: "badge" }, unread > 99 ? "99+" : String(unread), h("span", { class: "unseen" }, " new")) : null;
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
  zoom(range.from, range.to); // charts are drawn again
  localStorage.setItem("levada-theme", name);
}
const stored = localStorage.getItem("levada-theme");
theme(THEMES.includes(stored) ? stored : "auto");
$("theme").addEventListener("click", () => theme(THEMES[(THEMES.indexOf(localStorage.getItem("levada-theme")) + 1) % 3]));

$("node").addEventListener("click", () => show("nodes"));

$("search").addEventListener("input", () => {
  const searched = Boolean(state.search);
  state.search = $("search").value;
  if (searched !== Boolean(state.search)) columns();
  else if (state.page !== "events") $("grid").scrollTop = 0;
  if (state.page === "events") drawEvents();
  tell();
});
function internals() {
  state.internals = !state.internals;
  $("internals").setAttribute("aria-pressed", state.internals);
  if (state.page !== "actors") show("actors");
  tell();
}
$("internals").addEventListener("click", internals);
$("span").addEventListener("change", () => {
  range.seconds = Number($("span").value);
  zoom(null, null);
});
addEventListener("keydown", (event) => {
  const typing = /^(INPUT|SELECT)$/.test(document.activeElement?.tagName ?? "") || event.ctrlKey || event.metaKey || event.altKey;
  if (event.key === "/" && !typing) {
    event.preventDefault();
    $("search").focus();
  } else if (event.key === "i" && !typing) internals();
  else if (event.key === "Escape" && document.activeElement === $("search")) $("grid").focus();
});
addEventListener("hashchange", () => (location.hash.startsWith("#token=") ? begin() : fromAddress()));
addEventListener("visibilitychange", tell);
narrow.addEventListener("change", () => { columns(); tell(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => zoom(range.from, range.to));

begin();
