// npm's rsocket-core 0.0.27 serving, or calling, the contract of `levada interop rsocket`.
//   rsocket_classic.cjs server tcp|ws       prints "LISTENING <port>" and serves until its standard input ends
//   rsocket_classic.cjs client tcp|ws PORT  calls every route and prints what came back, a JSON line for each
"use strict";
const net = require("node:net");
const { RSocketClient, RSocketServer, BufferEncoders } = require("rsocket-core");
const { Flowable, Single } = require("rsocket-flowable");
const TcpClient = require("rsocket-tcp-client").default;
const TcpServer = require("rsocket-tcp-server").default;
const WsClient = require("rsocket-websocket-client").default;
const WsServer = require("rsocket-websocket-server").default;
const WebSocket = require("ws");

const BIG = 5_000_000;
const text = (buffer) => (buffer ? buffer.toString() : "");
const bytes = (value) => Buffer.from(String(value));

// ---------------------------------------------------------------- serving

const counts = { slow: 0, fnf: 0 };

// A flowable of what `make(i)` gives for i below count, as the requester asks for it.
function sequence(count, make) {
  return new Flowable((subscriber) => {
    let sent = 0, ended = false;
    subscriber.onSubscribe({
      cancel: () => (ended = true),
      request(n) {
        for (; n > 0 && !ended && sent < count; n--) subscriber.onNext({ data: make(sent++) });
        if (!ended && sent === count) {
          ended = true;
          subscriber.onComplete();
        }
      },
    });
  });
}

const contract = {
  fireAndForget(payload) {
    if (text(payload.metadata) === "fnf") counts.fnf += 1;
  },
  requestResponse(payload) {
    const name = text(payload.metadata);
    if (name === "echo") return Single.of(payload);
    if (name === "fail") return Single.error(new Error(text(payload.data)));
    if (name === "slow") {
      counts.slow += 1;
      return new Single((subscriber) => subscriber.onSubscribe(() => (counts.slow -= 1)));
    }
    if (name === "slow-open") return Single.of({ data: bytes(counts.slow) });
    if (name === "fnf-count") return Single.of({ data: bytes(counts.fnf) });
    if (name === "len") return Single.of({ data: bytes(payload.data.length) });
    return Single.error(new Error(`unknown route: ${name}`));
  },
  requestStream(payload) {
    const name = text(payload.metadata);
    if (name === "count") return sequence(Number(text(payload.data)), bytes);
    if (name === "blob") {
      const [count, size] = text(payload.data).split(" ").map(Number);
      return sequence(count, () => Buffer.alloc(size));
    }
    return Flowable.error(new Error(name === "fail" ? text(payload.data) : `unknown route: ${name}`));
  },
  requestChannel: (payloads) => payloads,
};

function serve(carrier) {
  let server;
  const ready = () => console.log(`LISTENING ${server.address().port}`);
  const transport =
    carrier === "tcp"
      ? new TcpServer(
          {
            host: "127.0.0.1", port: 0,
            serverFactory: (accepted) => (server = net.createServer(accepted).on("listening", ready)),
          },
          BufferEncoders,
        )
      : new WsServer(
          { host: "127.0.0.1", port: 0 },
          BufferEncoders,
          (options) => (server = new WebSocket.Server(options).on("listening", ready)),
        );
  new RSocketServer({ getRequestHandler: () => contract, transport }).start();
  process.stdin.resume().on("end", () => process.exit(0));
}

// ---------------------------------------------------------------- calling

const say = (check, got) => console.log(JSON.stringify({ check, got }));

const payloadOf = (route, data = "") => ({ data: Buffer.isBuffer(data) ? data : bytes(data), metadata: bytes(route) });

const promised = (single) =>
  new Promise((onComplete, onError) => single.subscribe({ onComplete, onError, onSubscribe() {} }));

function gathered(flowable, window) {
  return new Promise((resolve, reject) => {
    const items = [];
    let subscription;
    flowable.subscribe({
      onSubscribe: (given) => (subscription = given).request(window),
      onNext(payload) {
        items.push(payload.data);
        if (items.length % window === 0) subscription.request(window);
      },
      onError: reject,
      onComplete: () => resolve(items),
    });
  });
}

const failure = (promise) => promise.then(() => "no error", (error) => error.source?.message ?? error.message);

async function settled(peer, route, wanted) {
  let got;
  for (let i = 0; i < 200 && got !== wanted; i++) {
    if (i) await new Promise((resolve) => setTimeout(resolve, 10));
    got = text((await promised(peer.requestResponse(payloadOf(route)))).data);
  }
  return got;
}

async function call(carrier, port) {
  const transport =
    carrier === "tcp"
      ? new TcpClient({ host: "127.0.0.1", port }, BufferEncoders)
      : new WsClient({ url: `ws://127.0.0.1:${port}/`, wsCreator: (url) => new WebSocket(url) }, BufferEncoders);
  const setup = {
    metadataMimeType: "text/plain", dataMimeType: "application/octet-stream", keepAlive: 1000, lifetime: 30000,
  };
  const peer = await promised(new RSocketClient({ setup, transport }).connect());
  const ask = (route, data) => promised(peer.requestResponse(payloadOf(route, data)));
  const numbers = (items) => items.map((data) => Number(text(data)));
  const echoed = await ask("echo", "hello");
  say("echo", [text(echoed.data), text(echoed.metadata)]);
  for (const window of [7, 0x7fffffff]) {
    say(`count ${window}`, numbers(await gathered(peer.requestStream(payloadOf("count", "100")), window)));
  }
  const outgoing = sequence(10, bytes).map(({ data }) => payloadOf("chan", data));
  say("chan", numbers(await gathered(peer.requestChannel(outgoing), 4)));
  say("fail", await failure(ask("fail", "boom")));
  say("fail stream", await failure(gathered(peer.requestStream(payloadOf("fail", "boom")), 3)));
  say("unknown", await failure(ask("nowhere")));
  const cancels = [];
  for (let i = 0; i < 3; i++) {
    peer.requestResponse(payloadOf("slow")).subscribe({ onSubscribe: (cancel) => cancels.push(cancel) });
  }
  say("slow", await settled(peer, "slow-open", "3"));
  for (const cancel of cancels) cancel();
  say("cancelled", await settled(peer, "slow-open", "0"));
  for (let i = 0; i < 5; i++) peer.fireAndForget(payloadOf("fnf", "x"));
  say("fnf", await settled(peer, "fnf-count", "5"));
  say("len", text((await ask("len", Buffer.alloc(BIG))).data));
  say("blob", (await gathered(peer.requestStream(payloadOf("blob", `3 ${BIG}`)), 1)).map((data) => data.length));
  process.exit(0);
}

const [mode, carrier, port] = process.argv.slice(2);
if (mode === "server") serve(carrier);
else {
  call(carrier, Number(port)).catch((error) => {
    console.error(error);
    process.exit(1);
  });
}
