// A WebSocket client made with npm's ws, for one scenario against an echo server.
// usage: node websocket_client.cjs URL SCENARIO [CA]; prints one JSON value and ends.
"use strict";
const fs = require("fs");
const crypto = require("crypto");
const WebSocket = require("ws");

const [url, scenario, ca] = process.argv.slice(2);
const options = { maxPayload: 8 << 20 };
if (ca) options.ca = fs.readFileSync(ca);

const socket = new WebSocket(url, scenario === "subprotocol" ? ["other", "rsocket"] : [], options);
const next = (event) => new Promise((resolve) => socket.once(event, (...values) => resolve(values)));
const closed = next("close");
const opened = next("open");
const finish = (value) => console.log(JSON.stringify(value));

async function ended() {
  const [code, reason] = await closed;
  return { code, reason: reason.toString() };
}

async function echoed(data) {
  const reply = next("message");
  socket.send(data);
  const [got, isBinary] = await reply;
  return isBinary && got.equals(data);
}

const scenarios = {
  async echo() {
    const results = {};
    for (const size of [0, 1, 125, 126, 1023, 1024, 65535, 65536, 5 << 20]) results[size] = await echoed(crypto.randomBytes(size));
    socket.close(4002, "enough");
    return { results, ...(await ended()) };
  },
  async many() {
    const wanted = [];
    const got = [];
    const all = new Promise((resolve) => {
      socket.on("message", (data) => {
        got.push(data.toString());
        if (got.length === 2000) resolve();
      });
    });
    for (let i = 0; i < 2000; i++) {
      wanted.push(`message ${i}`);
      socket.send(Buffer.from(wanted[i]));
    }
    await all;
    socket.close();
    return { same: JSON.stringify(wanted) === JSON.stringify(got), ...(await ended()) };
  },
  async fragments() {
    const reply = next("message");
    const pong = next("pong");
    socket.send(Buffer.from("one "), { fin: false });
    socket.ping("between");
    socket.send(Buffer.from("two "), { fin: false });
    socket.send(Buffer.from("three"), { fin: true });
    const [data] = await reply;
    const [payload] = await pong;
    socket.close(1000);
    return { data: data.toString(), pong: payload.toString(), ...(await ended()) };
  },
  async text() {
    socket.send("text");
    return ended();
  },
  async large() {
    socket.send(crypto.randomBytes((6 << 20) + 1));
    return ended();
  },
  async broken() {
    socket._socket.write(Buffer.from([0xf2, 0x80, 0, 0, 0, 0])); // all reserved bits
    return ended();
  },
  async closed_by_server() {
    socket.send(Buffer.from("close me"));
    return ended();
  },
  async subprotocol() {
    socket.close();
    return { protocol: socket.protocol, ...(await ended()) };
  },
};

socket.on("unexpected-response", (request, response) => {
  let body = "";
  response.on("data", (data) => (body += data));
  response.on("end", () => finish({ status: response.statusCode, body }));
});
socket.on("error", () => {});
opened.then(() => scenarios[scenario]()).then(finish);
