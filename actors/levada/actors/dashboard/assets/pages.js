// What each page shows: its columns, from the rows that the program sends.

import { count, octets, rate, seconds, some } from "./format.js";

const last = (path) => path.slice(path.lastIndexOf("/") + 1);
const text = (value) => (value === undefined || value === null ? "" : String(value));
const report = (row) => row.report ?? {};
const column = (label, width, least, value, more = {}) => ({ label, width, least, text: value, raw: value, ...more });
// A figure: `value` is what it is sorted by, `format` what is shown.
const number = (label, least, value, format, more = {}) =>
  column(label, `${least}px`, least, (row) => format(value(row)), { number: true, raw: value, ...more });

// The rest of a report, for people: what the columns do not show.
const rest = (row, shown) => row.error ?? Object.entries(report(row))
  .filter(([name, value]) => !shown.includes(name) && value !== null && value !== "" && value !== 0)
  .map(([name, value]) => `${name.replaceAll("_", " ")} ${typeof value === "number" ? count(value) : text(value)}`).join(" · ");

const phase = (row) => (row.subject === "listener" ? "listens" : text(report(row).phase));

const CONNECTION = ["protocol", "side", "phase", "identity", "address", "bytes_sent", "bytes_received", "unsent", "url"];
// What flow control lets pass: bytes, or a number with what it counts.
function passes(row, way) {
  const window = row.window;
  if (row.subject === "listener") return "";
  if (typeof window?.[way] !== "number") return "–";
  return window.unit === "bytes" || way === "queued" ? octets(window[way]) : `${count(window[way])} ${window.unit}`;
}

const QUERY = ["name", "batch", "rows", "arrival_rate", "processing_rate", "seconds", "state_rows", "watermark"];

const doing = (row) => [row.handler, row.where, row.waits_for.length ? `waits for ${row.waits_for.join(", ")}` : "", row.about].filter(Boolean).join(" ");

const actors = (live) => [
  column("actor", "minmax(150px, 3fr)", 150, (row) => (live.tree && row.level ? last(row.path) : (row.node ?? "") + row.path.slice(live.tree ? 1 : 0)) + (live.tree && row.hidden > 1 ? `  (${count(row.hidden)})` : ""), { style: "name", hint: (row) => (row.node ?? "") + row.path, key: "name" }),
  column("class", "minmax(90px, 1fr)", 90, (row) => row.kind.replace(/^_+/, ""), { key: "class" }),
  column("state", "84px", 84, (row) => row.state, { state: (row) => row.state, key: "state" }),
  number("queue", 80, (row) => row.depth, count, { title: "messages in its mailbox", key: "queue" }),
  number("oldest", 80, (row) => row.age || null, seconds, { title: "how long the oldest message has waited, at most", key: "oldest" }),
  number("per s", 76, (row) => row.rate, rate, { title: "messages handled per second", key: "rate" }),
  number("wait ≈", 80, (row) => row.wait, seconds, { title: "messages in the queue, divided by those handled per second", key: "wait" }),
  number("handled", 92, (row) => row.handled, count, { key: "handled" }),
  number("restarts", 84, (row) => row.restarts, some, { key: "restarts" }),
  column("in", "minmax(120px, 2fr)", 120, doing, { key: "in" }),
];

// `served`: the program sorts all rows, by the keys of the columns; elsewhere the page sorts those that it has.
export const PAGES = {
  // Beside the charts there is less room.
  overview: { label: "Overview", narrow: [0, 2, 4], served: true, columns: (live) => actors(live).filter(({ key }) => !["wait", "handled", "in"].includes(key)) },
  actors: { label: "Actors", tree: true, narrow: [0, 2, 3, 5], served: true, columns: actors },
  flow: {
    label: "Flow", narrow: [0, 1, 2],
    columns: () => [
      column("from", "minmax(140px, 2fr)", 140, (row) => row.path, { style: "name" }),
      column("to", "minmax(140px, 2fr)", 140, (row) => row.to, { style: "name" }),
      number("messages ≈", 110, (row) => row.sent, some, { title: "sent within a turn since you look: one turn in 63 is looked at, and counts 63 times" }),
      number("seen waiting", 110, (row) => row.waited, some, { title: "how often an ask or a send was seen to wait" }),
      number("channels", 84, (row) => row.channels, some, { title: "channels whose ends they hold in fields" }),
      number("refs", 80, (row) => row.refs, some, { title: "refs in fields: who can send" }),
    ],
  },
  connections: {
    label: "Connections", narrow: [0, 1, 4, 5],
    columns: () => [
      column("protocol", "130px", 90, (row) => (row.subject === "listener" ? text(report(row).url).split(":")[0] : text(report(row).protocol || row.kind))),
      column("peer", "minmax(150px, 2fr)", 130, (row) => (row.subject === "listener" ? text(report(row).url) : text(report(row).address || row.about)), { style: "mono" }),
      column("identity", "minmax(80px, 1fr)", 80, (row) => text(report(row).identity)),
      column("state", "100px", 90, phase, { state: phase }),
      number("in per s", 84, (row) => row.received, octets),
      number("out per s", 84, (row) => row.sent, octets),
      number("may send", 104, (row) => row.window?.send, count, { text: (row) => passes(row, "send"), title: "what the peer lets this side send now" }),
      number("may receive", 104, (row) => row.window?.receive, count, { text: (row) => passes(row, "receive"), title: "what this side lets the peer send now" }),
      number("queued", 76, (row) => row.window?.queued, count, { text: (row) => passes(row, "queued"), title: "bytes that wait in the carrier" }),
      column("more", "minmax(160px, 3fr)", 160, (row) => rest(row, CONNECTION)),
      column("actor", "minmax(100px, 1fr)", 100, (row) => row.path, { style: "name" }),
    ],
  },
  channels: {
    label: "Channels", narrow: [0, 2, 5],
    columns: () => [
      column("held by", "minmax(140px, 2fr)", 130, (row) => row.path, { style: "name" }),
      column("name", "minmax(100px, 1fr)", 100, (row) => row.name),
      column("end", "minmax(90px, 1fr)", 90, (row) => row.end),
      column("messages", "minmax(90px, 1fr)", 90, (row) => row.item),
      column("mode", "100px", 90, (row) => row.mode),
      number("queued", 80, (row) => row.queued, count),
      number("window", 80, (row) => row.window, count),
    ],
  },
  journals: {
    label: "Journals", narrow: [0, 2, 6],
    columns: () => [
      column("journal", "minmax(140px, 1fr)", 130, (row) => text(report(row).name || row.path), { hint: (row) => text(report(row).directory) || row.path }),
      number("partitions", 84, (row) => report(row).partitions, count),
      number("rows", 100, (row) => report(row).rows, count),
      number("size", 84, (row) => report(row).bytes_stored, octets),
      number("appended per s", 110, (row) => row.appended, rate),
      number("waiting", 80, (row) => report(row).appends_waiting, count, { text: (row) => (report(row).full ? "full" : count(report(row).appends_waiting)), state: (row) => (report(row).full ? "bad" : "") }),
      column("behind, by group", "minmax(160px, 2fr)", 140, (row) => row.error ?? (Object.entries(report(row).groups ?? {}).map(([group, lag]) => `${group} ${count(lag)}`).join(" · ") || "no groups")),
      column("actor", "minmax(100px, 1fr)", 100, (row) => row.path, { style: "name" }),
    ],
  },
  queries: {
    label: "Queries", narrow: [0, 2, 4],
    columns: () => [
      column("query", "minmax(120px, 1fr)", 120, (row) => text(report(row).name || last(row.path))),
      column("state", "84px", 84, (row) => row.state, { state: (row) => row.state }),
      number("batch", 72, (row) => report(row).batch, count),
      number("rows", 84, (row) => report(row).rows, count),
      number("in per s", 84, (row) => report(row).arrival_rate, rate),
      number("done per s", 88, (row) => report(row).processing_rate, rate),
      number("batch took", 88, (row) => report(row).seconds, seconds),
      number("state rows", 96, (row) => report(row).state_rows, count),
      column("watermark", "minmax(120px, 1fr)", 120, (row) => text(report(row).watermark)),
      column("more", "minmax(120px, 2fr)", 120, (row) => rest(row, QUERY)),
    ],
  },
  nodes: {
    label: "Nodes", narrow: [0, 1, 5],
    columns: () => [
      column("node", "minmax(100px, 1fr)", 100, (row) => row.name, { style: "name" }),
      column("state", "90px", 80, (row) => row.state, { state: (row) => row.state }),
      number("process", 84, (row) => row.pid, text),
      column("host", "minmax(80px, 1fr)", 80, (row) => text(row.host)),
      number("restarts", 76, (row) => row.restarts, some),
      number("actors", 84, (row) => row.statistics?.actors, count),
      number("waiting", 76, (row) => row.statistics?.waiting, count),
      number("failures", 76, (row) => row.statistics?.failures, some),
      number("dead letters", 96, (row) => row.statistics?.dead_letters, some),
      column("", "minmax(120px, 2fr)", 120, (row) => text(row.error)),
    ],
  },
};

export const NONE = {
  flow: "no ties between actors", overview: "no actors of the program's own", actors: "no actors", connections: "no connections", channels: "no actor holds a channel in a field", journals: "no journals",
  queries: "no queries", nodes: "this program has no nodes", found: "nothing found",
};
