// Talking to the server: one streamed chat completion, and the state of the live view.

/** What went wrong, to be shown as it is. status: 0 if there was no answer. */
export class ApiFailure extends Error {
  constructor(message, status = 0, requestId = "") {
    super(message);
    this.status = status;
    this.requestId = requestId;
  }
}

const headers = (key) => (key ? { authorization: `Bearer ${key}` } : {});

async function failure(response) {
  const id = response.headers.get("x-request-id") ?? "";
  const text = await response.text().catch(() => "");
  try {
    return new ApiFailure(JSON.parse(text).error.message, response.status, id);
  } catch {
    return new ApiFailure(`${response.status} ${response.statusText}`.trim(), response.status, id);
  }
}

async function reach(path, options) {
  try {
    return await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiFailure("The server cannot be reached. It may have stopped; try again in a moment.");
  }
}

/** The data of each server-sent event in a stream of bytes. */
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      held += value;
      const parts = held.split(/\r?\n\r?\n/);
      held = parts.pop();
      for (const part of parts) {
        const data = part.split(/\r?\n/).filter((line) => line.startsWith("data:"));
        if (data.length) yield data.map((line) => line.slice(5).replace(/^ /, "")).join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** The chunks of a streamed chat completion. Throws ApiFailure, or AbortError if `signal` says so. */
export async function* chat(body, key, signal) {
  const response = await reach("v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json", ...headers(key) },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  if (!response.ok) throw await failure(response);
  try {
    for await (const data of events(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiFailure(chunk.error.message, 500, chunk.error.request_id);
      yield chunk;
    }
  } catch (error) {
    if (error instanceof ApiFailure || signal.aborted) throw error;
    throw new ApiFailure("The connection broke while the model answered.");
  }
  throw new ApiFailure("The answer ended early: the connection was closed.");
}

/** Add what a chunk brings to `message`: {content, reasoning, calls, finish, usage}. */
export function fold(message, chunk) {
  if (chunk.usage) message.usage = chunk.usage;
  const choice = chunk.choices?.[0];
  if (!choice) return;
  const delta = choice.delta ?? {};
  message.reasoning += delta.reasoning_content ?? "";
  message.content += delta.content ?? "";
  for (const part of delta.tool_calls ?? []) {
    const call = (message.calls[part.index] ??= { id: "", name: "", arguments: "" });
    call.id = part.id ?? call.id;
    call.name = part.function?.name ?? call.name;
    call.arguments += part.function?.arguments ?? "";
  }
  if (choice.finish_reason) message.finish = choice.finish_reason;
}

/** The figures of the live view. Throws ApiFailure. */
export async function state(key) {
  const response = await reach("ui/state", { headers: headers(key), cache: "no-store" });
  if (!response.ok) throw await failure(response);
  return await response.json();
}
