// Ships events with one of npm's packages that speak Lumberjack.
//   lumberjack.cjs KIND PORT COUNT [CA]: COUNT events, numbered from 0, to 127.0.0.1; over TLS if there is a CA file.
// Prints SENT when all were handed to the package and stays until its standard input ends, as none of them tells what was delivered.
"use strict";
const fs = require("node:fs");

const [kind, port, count, ca] = process.argv.slice(2);
const options = { host: "127.0.0.1", port: Number(port), ...(ca ? { ca: [fs.readFileSync(ca)] } : {}) };
const sent = () => console.log("SENT");

const kinds = {
  // Version 1, TLS only, plain data frames, a window of 1000 announced once.
  "lumberjack-protocol"() {
    const client = require("lumberjack-protocol").client(options, { maxQueueSize: 2 * count });
    for (let i = 0; i < count; i++) client.writeDataFrame({ line: `event ${i}`, number: i });
    client.on("connect", sent);
  },
  // A stream for bunyan on top of it.
  "bunyan-lumberjack"() {
    const stream = require("bunyan-lumberjack")({
      tlsOptions: options,
      lumberjackOptions: { maxQueueSize: 2 * count, unref: false },
    });
    const log = require("bunyan").createLogger({ name: "shipped", streams: [{ type: "raw", stream }] });
    for (let i = 0; i < count; i++) log.info({ number: i }, `event ${i}`);
    sent();
  },
  // Version 2, an envelope for each call, acks never read.
  "lumberjack-client"() {
    const Client = require("lumberjack-client");
    const client = new Client(options, ca !== undefined);
    for (let i = 0; i < count; i++) client.log({ message: `event ${i}`, number: i });
    sent();
  },
};
kinds[kind]();
process.stdin.resume().on("end", () => process.exit(0));
