"""The same session over an endpoint that speaks OpenAI's protocol. Here a small one of our own stands in for it."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import orchard
from orchard.session.executors.endpoint import EndpointExecutor


class Endpoint(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][-1]["content"]
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for word in ("You ", "said: ", asked):
            chunk = {"choices": [{"delta": {"content": word}}]}
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.write(b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n')

    def log_message(self, *words: object) -> None:
        return None


server = HTTPServer(("127.0.0.1", 0), Endpoint)
threading.Thread(target=server.serve_forever, daemon=True).start()
model = EndpointExecutor(f"http://127.0.0.1:{server.server_port}/v1", "some-model", api_key="")
for delta in orchard.Session(model=model, guardrails=None).stream("Hello").deltas():
    print(delta, end="|")
print()
server.shutdown()
server.server_close()
