// Server-sent events out of a response's body: the data of each event, as soon as its last line is there.

const LINE = /\r\n|\n|\r/;

/** The `data` of every event. Comments and other fields are passed over, as the format asks. */
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      rest += value;
      const held = rest.endsWith("\r") ? "\r" : ""; // its line feed may come with the next piece
      const lines = rest.slice(0, rest.length - held.length).split(LINE);
      rest = lines.pop() + held;
      for (const line of lines) {
        if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        } else if (line.startsWith("data:")) {
          data.push(line.slice(line[5] === " " ? 6 : 5));
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // leaving early hangs up, and the server stops writing
  }
}
