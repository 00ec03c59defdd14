// Opens a session, verifies a hand-made draft and reads health, over TLS with a token.
// node client.js HOST:PORT CA_FILE PROTO_DIR TOKEN...  prints one JSON object: what each call answered.
// A token of "-" is none.
'use strict';

const fs = require('fs');
const path = require('path');
const grpc = require('@grpc/grpc-js');
const loader = require('@grpc/proto-loader');

const [address, caFile, protoDir, token] = process.argv.slice(2);
const options = { keepCase: true, longs: String, enums: String, defaults: true, includeDirs: [protoDir] };
const load = (file) => grpc.loadPackageDefinition(loader.loadSync(file, options));
const outrider = load('outrider/common/pb/outrider.proto').outrider.v1;
const health = load(path.join(__dirname, 'health.proto')).grpc.health.v1;

const credentials = grpc.credentials.createSsl(fs.readFileSync(caFile));
const verifier = new outrider.Verifier(address, credentials);
const probe = new health.Health(address, credentials);
const sessionId = Buffer.from(Array.from({ length: 16 }, (_, i) => i));

function metadata() {
  const found = new grpc.Metadata();
  found.set('x-session-id', sessionId.toString('hex'));
  if (token !== '-') found.set('authorization', `Bearer ${token}`);
  return found;
}

const deadline = () => ({ deadline: Date.now() + 10000 });

function unary(client, method, request, withMetadata) {
  return new Promise((resolve) => {
    client[method](request, withMetadata || new grpc.Metadata(), deadline(), (error, answer) => {
      resolve(error ? { code: grpc.status[error.code], details: error.details } : answer);
    });
  });
}

function opening() {
  return {
    session_id: sessionId,
    token_ids: [5, 6, 7],
    num_prompt_tokens: 3,
    ignore_eos: true,
    sampling: { temperature: 0.0 },
  };
}

// Open and verify on one bidirectional stream, as an edge does.
function overStream(draft) {
  return new Promise((resolve) => {
    const found = {};
    const stream = verifier.Session(metadata(), deadline());
    stream.on('error', (error) => {
      found.code = grpc.status[error.code];
      found.details = error.details;
      resolve(found);
    });
    stream.on('end', () => resolve(found));
    stream.on('data', (message) => {
      if (message.open) {
        const opened = message.open.opened;
        found.position = opened.position;
        found.firstToken = opened.first_token;
        stream.write({
          verify: {
            round_id: '1',
            base_position: opened.position,
            base_hash: opened.hash,
            draft_tokens: draft,
            q_token_probs: draft.map(() => 0.5),
          },
        });
      } else if (message.verify) {
        found.verdict = message.verify.verdict;
        stream.write({ close: {} });
        stream.end();
      } else if (message.close) {
        found.wasOpen = message.close.was_open;
      }
    });
    stream.write({ open: opening() });
  });
}

async function main() {
  const answers = {
    health: await unary(probe, 'Check', { service: 'outrider.v1.Verifier' }),
    describe: await unary(verifier, 'Describe', {}, metadata()),
    open: await unary(verifier, 'Open', opening(), metadata()),
    stream: await overStream(process.argv.slice(6).map(Number)),
  };
  console.log(JSON.stringify(answers));
  // Its own `close` is hidden by the RPC of that name.
  for (const client of [verifier, probe]) grpc.Client.prototype.close.call(client);
}

main();
