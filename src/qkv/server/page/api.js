// The server's OpenAI interface: one call for whole answers, one for streamed ones, and one kind of error.

/** What went wrong. `kind` names a sentence of ours (see i18n.js); `message` is the server's own, if it sent one. */
export class ApiError extends Error {
  constructor(kind, { message = "", status = 0, retryAfter = "" } = {}) {
    super(message || kind);
    Object.assign(this, { kind, status, retryAfter, detail: message });
  }
}

// Kept for this tab only: a key does not belong into storage that outlives it.
export const key = {
  get: () => sessionStorage.getItem("qkv-key") ?? "",
  set: (value) => sessionStorage.setItem("qkv-key", value),
};

const KINDS = { 401: "error_key", 429: "error_busy", 503: "error_busy" };

async function call(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  let response;
  try {
    const method = body ? "POST" : "GET";
    response = await fetch(path, { method, headers, body: body && JSON.stringify(body), signal });
  } catch (error) {
    throw signal?.aborted ? error : new ApiError("error_unreachable");
  }
  if (response.ok) return response;
  const text = await response.text();
  const retryAfter = response.headers.get("Retry-After") ?? "";
  const { status } = response;
  throw new ApiError(KINDS[status] ?? "error_server", { message: messageOf(text), status, retryAfter });
}

/** The message in an error's body; a proxy in between may have sent something that is not JSON. */
function messageOf(text) {
  try {
    return JSON.parse(text).error.message;
  } catch {
    return "";
  }
}

/** The models that the server offers; the first is the one that is loaded. */
export async function models() {
  return (await (await call("v1/models")).json()).data;
}

/** A whole answer at once. */
export async function complete(body, signal) {
  return (await call("v1/chat/completions", body, signal)).json();
}

/** The chunks of an answer as they arrive. Throws where the stream ends before its `[DONE]`. */
export async function* stream(body, signal) {
  const response = await call(
    "v1/chat/completions",
    { ...body, stream: true, stream_options: { include_usage: true } },
    signal,
  );
  for await (const line of lines(response.body, signal)) {
    if (!line.startsWith("data:")) continue; // blank lines, and comments that keep the connection open
    const data = line.slice(5).trim();
    if (data === "[DONE]") return;
    const chunk = parsed(data);
    if (chunk.error) throw new ApiError("error_server", { message: chunk.error.message });
    yield chunk;
  }
  throw new ApiError("error_cut");
}

function parsed(data) {
  try {
    return JSON.parse(data);
  } catch {
    throw new ApiError("error_cut");
  }
}

async function* lines(body, signal) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const complete = (rest + value).split("\n");
      rest = complete.pop();
      yield* complete;
    }
  } catch (error) {
    throw signal?.aborted || error instanceof ApiError ? error : new ApiError("error_cut");
  } finally {
    reader.cancel().catch(() => {}); // the stream may have failed already, and that was told above
  }
}
