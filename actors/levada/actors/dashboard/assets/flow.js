// Who sends to whom, as a picture: senders left of receivers; the table below it says the same in words.

import { h, svg } from "./dom.js";
import { count } from "./format.js";

const WIDE = 220, HIGH = 26, GAP = 90, STEP = 40;
const MOST = 40; // boxes

export function picture(rows, go) {
  const names = [...new Set(rows.flatMap((row) => [row.path, row.to]))].slice(0, MOST);
  if (!names.length) return h("p", { class: "empty" }, "No actor of the program has a ref of another in a field, and none was seen to send.");
  const ties = rows.filter((row) => names.includes(row.path) && names.includes(row.to));
  // Each receiver is right of its senders; in a circle the first round decides.
  const level = new Map(names.map((name) => [name, 0]));
  for (let round = 0; round < 5; round += 1) {
    for (const { path, to } of ties) if (level.get(to) <= level.get(path) && level.get(path) < 5) level.set(to, level.get(path) + 1);
  }
  const used = [...new Set(level.values())].sort((one, two) => one - two);
  const taken = used.map(() => 0);
  const place = new Map(names.map((name) => {
    const column = used.indexOf(level.get(name));
    return [name, { x: 8 + column * (WIDE + GAP), y: 8 + STEP * taken[column]++ }];
  }));
  const width = 16 + used.length * WIDE + (used.length - 1) * GAP;
  const height = 8 + STEP * Math.max(...taken);
  const lines = ties.map((row) => {
    const from = place.get(row.path), to = place.get(row.to);
    const back = to.x <= from.x;
    const x1 = from.x + (back ? 0 : WIDE), x2 = to.x + (back ? WIDE : 0) + (back ? 8 : -8);
    const bend = back ? -GAP : GAP;
    const y1 = from.y + HIGH / 2, y2 = to.y + HIGH / 2;
    const seen = row.sent + row.waited > 0;
    return svg("path", { class: seen ? "tie seen" : "tie", d: `M${x1} ${y1}C${x1 + bend / 2} ${y1} ${x2 - bend / 2} ${y2} ${x2} ${y2}`, "marker-end": "url(#head)" });
  });
  const boxes = names.map((name) => {
    const { x, y } = place.get(name);
    const text = svg("text", { x: x + 8, y: y + 17 });
    text.textContent = name.length > 30 ? `…${name.slice(-29)}` : name;
    const title = svg("title");
    title.textContent = name;
    const box = svg("g", { class: "box" }, title, svg("rect", { x, y, width: WIDE, height: HIGH, rx: 6 }), text);
    if (!name.includes(" × ")) box.addEventListener("click", () => go(name));
    return box;
  });
  const head = svg("marker", { id: "head", viewBox: "0 0 8 8", refX: 1, refY: 4, markerWidth: 6, markerHeight: 6, orient: "auto" }, svg("path", { d: "M0 0L8 4L0 8z" }));
  const label = `Who sends to whom: ${count(names.length)} groups of actors and ${count(ties.length)} ties. The table has them in words.`;
  return svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label }, svg("defs", {}, head), ...lines, ...boxes);
}
