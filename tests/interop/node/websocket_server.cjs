// A WebSocket server made with npm's ws. The path says what it does with each message; see `on`.
// usage: node websocket_server.cjs [CERT KEY]; prints "LISTENING <port>"; ends when its standard input does.
"use strict";
const fs = require("fs");
const http = require("http");
const https = require("https");
const { WebSocketServer } = require("ws");

const [cert, key] = process.argv.slice(2);
const server = cert ? https.createServer({ cert: fs.readFileSync(cert), key: fs.readFileSync(key) }) : http.createServer();
const sockets = new WebSocketServer({
  server,
  maxPayload: 8 << 20,
  handleProtocols: (offered) => (offered.has("rsocket") ? "rsocket" : false),
});

const on = {
  // the message comes back as it was, text as text
  "/echo": (socket, data, isBinary) => socket.send(data, { binary: isBinary }),
  // the message comes back in three fragments with a ping between them
  "/fragments": (socket, data) => {
    const third = Math.ceil(data.length / 3);
    socket.send(data.subarray(0, third), { binary: true, fin: false });
    socket.ping("between");
    socket.send(data.subarray(third, 2 * third), { binary: true, fin: false });
    socket.send(data.subarray(2 * third), { binary: true, fin: true });
  },
  // a ping with the message goes out, and the payload of the pong comes back
  "/ping": (socket, data) => {
    socket.once("pong", (payload) => socket.send(payload));
    socket.ping(data);
  },
  // closes with code 4001 and the message as the reason, behind an echo
  "/close": (socket, data) => {
    socket.send(data);
    socket.close(4001, data);
  },
  // cuts the connection
  "/terminate": (socket) => socket.terminate(),
  // sends how and with what this client closed to whoever asks next
  "/last-close": (socket) => socket.send(lastClose),
};

let lastClose = "";
sockets.on("connection", (socket, request) => {
  const path = request.url.split("?")[0];
  socket.on("message", (data, isBinary) => on[path](socket, data, isBinary));
  socket.on("close", (code, reason) => {
    if (path !== "/last-close") lastClose = `${code} ${reason}`;
  });
  socket.on("error", () => {});
});
server.listen(0, "127.0.0.1", () => console.log(`LISTENING ${server.address().port}`));
process.stdin.resume();
process.stdin.on("end", () => process.exit(0));
