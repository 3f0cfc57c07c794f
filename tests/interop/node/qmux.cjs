// A QMux peer made with npm's @moq/qmux, over WebSocket: a server with the contract of `levada interop qmux`, and a client that goes
// through it.
// usage: node qmux.cjs serve ws|wss [CERT KEY]; prints "LISTENING <port>"; ends when its standard input does
//        node qmux.cjs call ws|wss PORT [CA]; prints a line of JSON with what it found
"use strict";
const fs = require("fs");
const http = require("http");
const https = require("https");
const { pathToFileURL } = require("url");
const { WebSocket, WebSocketServer } = require("ws");

const NAME = "interop";
const OPTIONS = { protocols: [NAME], versions: { [NAME]: "qmux-02" } };
const pattern = (count) => Uint8Array.from({ length: count }, (_, at) => at % 251);
const octets = (text) => new TextEncoder().encode(text);
const text = (data) => new TextDecoder().decode(data);
const ignore = () => {};

// The package needs it, and Node has it from version 22 on.
Promise.withResolvers ??= function () {
  const made = {};
  made.promise = new Promise((resolve, reject) => Object.assign(made, { resolve, reject }));
  return made;
};

let Session, StreamError, selectSubprotocol;

async function readAll(reader, first = []) {
  const parts = [...first];
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return Buffer.concat(parts);
    parts.push(value);
  }
}

async function each(readable, take) {
  const reader = readable.getReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    Promise.resolve(take(value)).catch(ignore);
  }
}

// ---------------------------------------------------------------- the server

async function echo(reader, writer, first) {
  try {
    for (const data of first) await writer.write(data);
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      await writer.write(value);
    }
    await writer.close();
  } catch (error) {
    if (error.source === "stream") await writer.abort(error); // reset, or stopped: the same code
  }
}

async function answer(session, socket, stream) {
  const reader = stream.readable.getReader();
  const writer = stream.writable.getWriter();
  writer.closed.catch(ignore);
  let head = Buffer.alloc(0);
  let end;
  for (;;) {
    let next;
    try {
      next = await reader.read();
    } catch (error) {
      return writer.abort(error);
    }
    if (next.done) return head.length ? writer.abort(new StreamError(1)) : writer.close();
    head = Buffer.concat([head, next.value]);
    if (head.length && head[0] !== 0x21) return echo(reader, writer, [head]);
    end = head.indexOf(10);
    if (end >= 0) break;
    if (head.length > 200) return writer.abort(new StreamError(1));
  }
  const rest = head.subarray(end + 1);
  const [line, name, argument] = /^!([a-z]+) ?(.*)$/s.exec(text(head.subarray(0, end))) ?? [];
  const number = /^\d+$/.test(argument) ? Number(argument) : undefined;
  if (name === "close" && /^\d+( |$)/.test(argument)) {
    const [, code, reason] = /^(\d+) ?(.*)$/s.exec(argument);
    return session.close({ closeCode: Number(code), reason });
  }
  if (line === "!drop") return socket.terminate();
  if (name === "reset" && number !== undefined) {
    await writer.abort(new StreamError(number));
    return readAll(reader);
  }
  if (name === "stop" && number !== undefined) {
    await reader.cancel(new StreamError(number));
    return writer.close();
  }
  if (name === "hold" && number !== undefined) {
    await new Promise((resolve) => setTimeout(resolve, number));
    await writer.write(octets(String((await readAll(reader, [rest])).length)));
    return writer.close();
  }
  if (name === "send" && number !== undefined) {
    await writer.write(pattern(number));
    return writer.close();
  }
  const [, kind, count] = name === "open" ? (/^(uni|bidi) (\d+)$/.exec(argument) ?? []) : [];
  if (kind) {
    for (let at = 0; at < Number(count); at++) {
      const opened =
        kind === "uni" ? await session.createUnidirectionalStream() : (await session.createBidirectionalStream()).writable;
      const own = opened.getWriter();
      await own.write(octets(String(at)));
      await own.close();
    }
    await writer.write(octets("done"));
    return writer.close();
  }
  return writer.abort(new StreamError(1));
}

function serve(cert, key) {
  const server = cert ? https.createServer({ cert: fs.readFileSync(cert), key: fs.readFileSync(key) }) : http.createServer();
  const sockets = new WebSocketServer({
    server,
    perMessageDeflate: false,
    handleProtocols: (offered) => selectSubprotocol([...offered], OPTIONS) ?? false,
  });
  sockets.on("connection", async (socket) => {
    const session = Session.accept(socket);
    session.closed.catch(ignore);
    await session.ready;
    each(session.incomingBidirectionalStreams, (stream) => answer(session, socket, stream)).catch(ignore);
    each(session.incomingUnidirectionalStreams, async (readable) => {
      const writable = await session.createUnidirectionalStream();
      await echo(readable.getReader(), writable.getWriter(), []);
    }).catch(ignore);
    const writer = session.datagrams.writable.getWriter();
    each(session.datagrams.readable, (data) => writer.write(data)).catch(ignore);
  });
  server.listen(0, "127.0.0.1", () => console.log(`LISTENING ${server.address().port}`));
  process.stdin.resume();
  process.stdin.on("end", () => process.exit(0));
}

// ---------------------------------------------------------------- the client

async function dial(scheme, port, ca) {
  const url = `${scheme}://localhost:${port}/qmux`;
  const settings = { perMessageDeflate: false, ...(ca ? { ca: fs.readFileSync(ca) } : {}) };
  const socket = new WebSocket(url, ["qmux-02.interop"], settings);
  const session = new Session(socket);
  session.closed.catch(ignore);
  await session.ready;
  return session;
}

async function open(session) {
  const stream = await session.createBidirectionalStream();
  const writer = stream.writable.getWriter();
  writer.closed.catch(ignore);
  return [writer, stream.readable.getReader()];
}

async function exchange(session, data) {
  const [writer, reader] = await open(session);
  const [got] = await Promise.all([
    readAll(reader),
    (async () => {
      if (data.length) await writer.write(data);
      await writer.close();
    })(),
  ]);
  return got;
}

const codeOf = (promise) => promise.then(() => null, (error) => error.streamErrorCode ?? `${error}`);

async function resetOf(session, command) {
  const [writer, reader] = await open(session);
  await writer.write(octets(command));
  const code = await codeOf(readAll(reader));
  await writer.close().catch(ignore); // the server may have stopped it
  return code;
}

async function call(scheme, port, ca) {
  const found = {};
  const session = await dial(scheme, port, ca);
  found.echo = [];
  for (const size of [0, 1, 16_382, 1_000_000]) {
    const got = await exchange(session, new Uint8Array(size).fill(120));
    found.echo.push(got.every((octet) => octet === 120) ? got.length : null);
  }
  const many = await Promise.all(Array.from({ length: 300 }, (_, at) => exchange(session, octets(`stream ${at}`))));
  found.many = many.filter((got, at) => text(got) === `stream ${at}`).length;

  const oneWay = (await session.createUnidirectionalStream()).getWriter();
  await oneWay.write(octets("one way"));
  await oneWay.close();
  const uni = session.incomingUnidirectionalStreams.getReader();
  found.uni = text(await readAll((await uni.read()).value.getReader()));

  const datagrams = session.datagrams.writable.getWriter();
  const arrived = session.datagrams.readable.getReader();
  found.datagrams = 0;
  for (let at = 0; at < 10; at++) {
    // One at a time: the package drops datagrams while others wait to be sent.
    await datagrams.write(octets(`datagram ${at}`));
    found.datagrams += text((await arrived.read()).value) === `datagram ${at}`;
  }

  let [writer, reader] = await open(session);
  await writer.write(octets("some"));
  await reader.read();
  await writer.abort(new StreamError(77));
  found.reset = await codeOf(readAll(reader));

  found.command_reset = await resetOf(session, "!reset 9\n");
  found.command_unknown = await resetOf(session, "!what\n");

  [writer, reader] = await open(session);
  await writer.write(octets("!stop 11\n"));
  await readAll(reader);
  found.command_stop = await codeOf(writer.closed);

  const data = Buffer.concat([octets("!hold 20\n"), Buffer.alloc(300_000)]);
  found.command_hold = Number(text(await exchange(session, data)));
  found.command_send = Buffer.compare(await exchange(session, octets("!send 100000\n")), Buffer.from(pattern(100_000))) === 0;

  const bidi = session.incomingBidirectionalStreams.getReader();
  for (const kind of ["uni", "bidi"]) {
    const asked = exchange(session, octets(`!open ${kind} 150\n`));
    let sum = 0;
    for (let at = 0; at < 150; at++) {
      const { value } = await (kind === "uni" ? uni : bidi).read();
      if (kind === "bidi") value.writable.close().catch(ignore);
      sum += Number(text(await readAll((kind === "uni" ? value : value.readable).getReader())));
    }
    found[`command_open_${kind}`] = text(await asked) === "done" ? sum : null;
  }

  exchange(session, octets("!close 42 so long\n")).catch(ignore);
  const { closeCode, reason } = await session.closed;
  found.command_close = [closeCode, reason];

  const other = await dial(scheme, port, ca);
  exchange(other, octets("!drop\n")).catch(ignore);
  found.command_drop = await other.closed.then((info) => info.closeCode, () => "lost");
  console.log(JSON.stringify(found));
  process.exit(0);
}

(async () => {
  ({ default: Session, StreamError, selectSubprotocol } = await import(pathToFileURL(require.resolve("@moq/qmux"))));
  const [role, scheme, ...rest] = process.argv.slice(2);
  if (role === "serve") serve(...rest);
  else await call(scheme, ...rest);
})();
