// npm's rsocket-core 1.0.0-alpha serving, or calling, the contract of `levada interop rsocket`.
//   rsocket_alpha.cjs server tcp|ws       prints "LISTENING <port>" and serves until its standard input ends
//   rsocket_alpha.cjs client tcp|ws PORT  calls every route and prints what came back, a JSON line for each
"use strict";
const net = require("node:net");
const { RSocketConnector, RSocketServer } = require("rsocket-core");
const { TcpClientTransport } = require("rsocket-tcp-client");
const { TcpServerTransport } = require("rsocket-tcp-server");
const { WebsocketClientTransport } = require("rsocket-websocket-client");
const { WebsocketServerTransport } = require("rsocket-websocket-server");
const WebSocket = require("ws");

const BIG = 5_000_000;
const FRAGMENT = 64 * 1024;
const text = (buffer) => (buffer ? buffer.toString() : "");
const bytes = (value) => Buffer.from(String(value));

// ---------------------------------------------------------------- serving

const counts = { slow: 0, fnf: 0 };

function answered(responder, payload) {
  responder.onNext(payload, true);
  return { cancel() {}, onExtension() {} };
}

function failed(responder, reason) {
  responder.onError(new Error(reason));
  return { cancel() {}, request() {}, onExtension() {} };
}

// Send what `make(i)` gives for i below count, as the requester asks for it.
function sequence(count, initial, responder, make) {
  let sent = 0, wanted = 0, ended = false;
  const pump = (n) => {
    wanted += n;
    while (!ended && sent < Math.min(count, wanted)) responder.onNext({ data: make(sent) }, ++sent === count);
    ended ||= sent === count;
  };
  pump(initial);
  return { cancel: () => (ended = true), request: pump, onExtension() {} };
}

const contract = {
  fireAndForget(payload, responder) {
    if (text(payload.metadata) === "fnf") counts.fnf += 1;
    responder.onComplete();
    return { cancel() {} };
  },
  requestResponse(payload, responder) {
    const name = text(payload.metadata);
    if (name === "echo") return answered(responder, payload);
    if (name === "fail") return failed(responder, text(payload.data));
    if (name === "slow") {
      counts.slow += 1;
      return { cancel: () => (counts.slow -= 1), onExtension() {} };
    }
    if (name === "slow-open") return answered(responder, { data: bytes(counts.slow) });
    if (name === "fnf-count") return answered(responder, { data: bytes(counts.fnf) });
    if (name === "len") return answered(responder, { data: bytes(payload.data.length) });
    return failed(responder, `unknown route: ${name}`);
  },
  requestStream(payload, initial, responder) {
    const name = text(payload.metadata);
    if (name === "count") return sequence(Number(text(payload.data)), initial, responder, bytes);
    if (name === "blob") {
      const [count, size] = text(payload.data).split(" ").map(Number);
      return sequence(count, initial, responder, () => Buffer.alloc(size));
    }
    return failed(responder, name === "fail" ? text(payload.data) : `unknown route: ${name}`);
  },
  requestChannel(payload, initial, completed, responder) {
    const waiting = [];
    let wanted = initial, complete = false, ended = false;
    const pump = () => {
      while (!ended && wanted > 0 && waiting.length) {
        responder.onNext(waiting.shift(), false);
        wanted -= 1;
      }
      if (!ended && complete && !waiting.length) {
        ended = true;
        responder.onComplete();
      }
    };
    const take = (item, last) => {
      waiting.push(item);
      complete ||= last;
      pump();
    };
    setImmediate(() => {
      take(payload, completed);
      if (!completed) responder.request(0x7fffffff);
    });
    return {
      onNext: take,
      onComplete: () => { complete = true; pump(); },
      onError: () => (ended = true),
      cancel: () => (ended = true),
      request: (n) => { wanted += n; pump(); },
      onExtension() {},
    };
  },
};

async function serve(carrier) {
  let server;
  const transport =
    carrier === "tcp"
      ? new TcpServerTransport({
          listenOptions: { port: 0, host: "127.0.0.1" },
          socketCreator: (options) => (server = net.createServer(options)),
        })
      : new WebsocketServerTransport({
          wsCreator: () => (server = new WebSocket.Server({ host: "127.0.0.1", port: 0 })),
        });
  const acceptor = { accept: async () => contract };
  await new RSocketServer({ transport, acceptor, fragmentation: { maxOutboundFragmentSize: FRAGMENT } }).bind();
  console.log(`LISTENING ${server.address().port}`);
  process.stdin.resume().on("end", () => process.exit(0));
}

// ---------------------------------------------------------------- calling

const say = (check, got) => console.log(JSON.stringify({ check, got }));

const payloadOf = (route, data) => ({ data: Buffer.isBuffer(data) ? data : bytes(data), metadata: bytes(route) });

function response(peer, route, data = "") {
  return new Promise((resolve, reject) => {
    const handlers = { onNext: resolve, onError: reject, onComplete: () => resolve(null), onExtension() {} };
    peer.requestResponse(payloadOf(route, data), handlers);
  });
}

function stream(peer, route, data, window) {
  return new Promise((resolve, reject) => {
    const items = [];
    const handlers = {
      onNext(payload, last) {
        items.push(payload.data);
        if (last) resolve(items);
        else if (items.length % window === 0) requester.request(window);
      },
      onError: reject,
      onComplete: () => resolve(items),
      onExtension() {},
    };
    const requester = peer.requestStream(payloadOf(route, data), window, handlers);
  });
}

function channel(peer, count, window) {
  return new Promise((resolve, reject) => {
    const items = [];
    let next = 1;
    const send = (n) => {
      for (; n > 0 && next < count; n--) requester.onNext({ data: bytes(next++) }, next === count);
    };
    const handlers = {
      onNext(payload, last) {
        items.push(Number(text(payload.data)));
        if (last) resolve(items);
        else if (items.length % window === 0) requester.request(window);
      },
      onError: reject,
      onComplete: () => resolve(items),
      request: (n) => send(n),
      cancel() {},
      onExtension() {},
    };
    const requester = peer.requestChannel(payloadOf("chan", "0"), window, false, handlers);
  });
}

const failure = (promise) => promise.then(() => "no error", (error) => error.message);

async function settled(peer, route, wanted) {
  let got;
  for (let i = 0; i < 200 && got !== wanted; i++) {
    if (i) await new Promise((resolve) => setTimeout(resolve, 10));
    got = text((await response(peer, route)).data);
  }
  return got;
}

async function call(carrier, port) {
  const transport =
    carrier === "tcp"
      ? new TcpClientTransport({ connectionOptions: { host: "127.0.0.1", port } })
      : new WebsocketClientTransport({ url: `ws://127.0.0.1:${port}/`, wsCreator: (url) => new WebSocket(url) });
  const setup = {
    metadataMimeType: "text/plain", dataMimeType: "application/octet-stream", keepAlive: 1000, lifetime: 30000,
  };
  const peer = await new RSocketConnector({
    transport, setup, fragmentation: { maxOutboundFragmentSize: FRAGMENT },
  }).connect();
  const echoed = await response(peer, "echo", "hello");
  say("echo", [text(echoed.data), text(echoed.metadata)]);
  for (const window of [7, 0x7fffffff]) {
    say(`count ${window}`, (await stream(peer, "count", "100", window)).map((data) => Number(text(data))));
  }
  say("chan", await channel(peer, 10, 4));
  say("fail", await failure(response(peer, "fail", "boom")));
  say("fail stream", await failure(stream(peer, "fail", "boom", 3)));
  say("unknown", await failure(response(peer, "nowhere")));
  const quiet = { onNext() {}, onError() {}, onComplete() {}, onExtension() {} };
  const pending = [1, 2, 3].map(() => peer.requestResponse(payloadOf("slow", ""), quiet));
  say("slow", await settled(peer, "slow-open", "3"));
  for (const request of pending) request.cancel();
  say("cancelled", await settled(peer, "slow-open", "0"));
  for (let i = 0; i < 5; i++) peer.fireAndForget(payloadOf("fnf", "x"), { onError() {}, onComplete() {} });
  say("fnf", await settled(peer, "fnf-count", "5"));
  say("len", text((await response(peer, "len", Buffer.alloc(BIG))).data));
  say("blob", (await stream(peer, "blob", `3 ${BIG}`, 1)).map((data) => data.length));
  process.exit(0);
}

const [mode, carrier, port] = process.argv.slice(2);
(mode === "server" ? serve(carrier) : call(carrier, Number(port))).catch((error) => {
  console.error(error);
  process.exit(1);
});
