// The conversation: what is said, how it is shown, and asking for the next answer.
import { ApiFailure, chat, fold } from "./api.js";
import { button, copyButton, element } from "./dom.js";
import { show } from "./markdown.js";

const NUMBERS = ["temperature", "top_p", "max_tokens"];
const SAVE_MS = 1000;

const answer = () => ({ role: "assistant", content: "", reasoning: "", calls: [], finish: null });

/** A message as the API has it. */
function wire(message) {
  if (message.role === "tool") return { role: "tool", tool_call_id: message.callId, content: message.content };
  if (message.role === "user") {
    if (!message.pictures?.length) return { role: "user", content: message.content };
    const pictures = message.pictures.map((url) => ({ type: "image_url", image_url: { url } }));
    return { role: "user", content: [...pictures, { type: "text", text: message.content }] };
  }
  if (!message.calls.length) return { role: "assistant", content: message.content };
  const calls = message.calls.map((call) => ({
    id: call.id,
    type: "function",
    function: { name: call.name, arguments: call.arguments || "{}" },
  }));
  return { role: "assistant", content: message.content, reasoning_content: message.reasoning, tool_calls: calls };
}

/** The request for the next answer. Throws ApiFailure if the settings make none. */
export function request(messages, settings) {
  const said = messages.filter((each) => each.role !== "assistant" || each.content || each.calls.length).map(wire);
  const body = { messages: settings.system ? [{ role: "system", content: settings.system }, ...said] : said };
  for (const name of NUMBERS) if (settings[name]) body[name] = Number(settings[name]);
  body.chat_template_kwargs = { enable_thinking: settings.enable_thinking };
  if (settings.model) body.model = settings.model;
  if (settings.tools?.trim()) {
    try {
      body.tools = JSON.parse(settings.tools);
    } catch (error) {
      throw new ApiFailure(`Tools, in the settings, are not JSON: ${error.message}`);
    }
  }
  return body;
}

export class Chat {
  /** on: settings(), key(), save(messages), busy(yes), needKey(): what the page around it does. */
  constructor(log, scroller, messages, on) {
    Object.assign(this, { log, scroller, on, messages: messages.map((each) => ({ ...each })) });
    this.nodes = [];
    this.abort = null;
    this.savedMs = 0;
    for (const message of this.messages) {
      if (message.role === "assistant" && !message.finish && !message.error) message.stopped = true;
    }
    this.draw();
    this.scroller.scrollTop = this.scroller.scrollHeight;
  }

  get running() {
    return this.abort !== null;
  }

  stop() {
    this.abort?.abort();
  }

  clear() {
    this.stop();
    this.messages = [];
    this.draw();
    this.on.save(this.messages);
  }

  say(content, pictures) {
    this.messages.push({ role: "user", content, pictures });
    return this.run();
  }

  /** Ask again for the last answer. */
  regenerate() {
    while (this.messages.at(-1)?.role === "assistant") this.messages.pop();
    return this.run();
  }

  giveResults(results) {
    const calls = this.messages.at(-1).calls;
    calls.forEach((call, i) => {
      this.messages.push({ role: "tool", callId: call.id, name: call.name, content: results[i] });
    });
    return this.run();
  }

  async run() {
    if (this.running) return;
    const conversation = this.messages;
    const asked = conversation.slice();
    const message = answer();
    conversation.push(message);
    const abort = (this.abort = new AbortController());
    this.on.busy(true);
    this.draw(true);
    const beginMs = performance.now();
    let firstMs = 0;
    try {
      for await (const chunk of chat(request(asked, this.on.settings()), this.on.key(), abort.signal)) {
        fold(message, chunk);
        if (!firstMs && (message.content || message.reasoning || message.calls.length)) firstMs = performance.now();
        this.later();
      }
    } catch (error) {
      if (abort.signal.aborted) message.stopped = true;
      else message.error = { message: error.message, status: error.status ?? 0, requestId: error.requestId ?? "" };
    }
    if (firstMs) message.timing = { firstMs: firstMs - beginMs, restMs: performance.now() - firstMs };
    this.abort = null;
    this.on.busy(false);
    this.draw();
    if (conversation === this.messages) this.on.save(this.messages);
  }

  /** Draw before the next frame, and save now and then. */
  later() {
    if (!this.frame) {
      this.frame = requestAnimationFrame(() => {
        this.frame = 0;
        this.draw();
      });
    }
    const nowMs = performance.now();
    if (nowMs - this.savedMs > SAVE_MS) {
      this.savedMs = nowMs;
      this.on.save(this.messages);
    }
  }

  draw(toEnd = false) {
    const { scroller } = this;
    const atEnd = toEnd || scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 60;
    this.log.setAttribute("aria-busy", String(this.running));
    this.messages.forEach((message, i) => {
      const last = i === this.messages.length - 1;
      // Only the last message changes; one that is not last any more loses its buttons, and is left alone then.
      if (this.nodes[i]?.message !== message) {
        const node = this.nodes[i]?.article;
        this.nodes[i] = make(message);
        if (node) node.replaceWith(this.nodes[i].article);
        else this.log.append(this.nodes[i].article);
      } else if (!last && this.nodes[i].state === "falsefalse") return;
      update(this.nodes[i], message, last, last && this.running, this);
    });
    for (const node of this.nodes.splice(this.messages.length)) node.article.remove();
    if (atEnd) scroller.scrollTop = scroller.scrollHeight;
  }
}

const WHO = { user: "You", assistant: "Model", tool: "Result" };

function make(message) {
  const article = element("article", { className: `message ${message.role}` });
  const who = message.role === "tool" ? `Result of ${message.name}` : WHO[message.role];
  article.append(element("h2", { className: message.role === "tool" ? "who" : "who offscreen" }, who));
  if (message.role !== "assistant") {
    const pictures = (message.pictures ?? []).map((src) => element("img", { src, alt: "Picture that was sent" }));
    if (pictures.length) article.append(element("div", { className: "sent" }, ...pictures));
    article.append(element("div", { className: "text plain" }, message.content));
    return { message, article };
  }
  const part = {
    thoughtText: element("div", { className: "plain" }),
    thoughtName: element("summary"),
    text: element("div", { className: "text" }),
    calls: element("div", { className: "calls" }),
    error: element("div", { className: "error", role: "alert", hidden: true }),
    foot: element("footer"),
  };
  part.thought = element("details", { className: "thought", hidden: true }, part.thoughtName, part.thoughtText);
  article.append(part.thought, part.text, part.calls, part.error, part.foot);
  return { message, article, ...part };
}

function update(node, message, last, running, view) {
  if (message.role !== "assistant") return;
  node.thought.hidden = !message.reasoning.trim();
  if (node.thoughtText.textContent !== message.reasoning) node.thoughtText.textContent = message.reasoning;
  const thinking = running && !message.content && !message.calls.length;
  node.thoughtName.textContent = thinking ? "Thinking …" : "Thought";
  node.thought.classList.toggle("working", thinking);
  node.article.classList.toggle("waiting", running && !message.content && !message.reasoning && !message.calls.length);
  show(node.text, message.content.replace(/^\s+/, ""));
  const state = `${last}${running}`;
  if (running || node.state !== state) drawCalls(node.calls, message, last && !running, view);
  if (node.state === state) return;
  node.state = state;
  drawError(node.error, message, view);
  node.foot.replaceChildren(...(running ? [] : foot(message, last, view)));
}

function drawCalls(into, message, open, view) {
  const fields = [];
  const shown = message.calls.map((call) => {
    const source = element("pre", { tabIndex: 0 }, element("code", {}, pretty(call.arguments)));
    const parts = [element("summary", {}, "Calls ", element("code", {}, call.name)), source];
    if (open && message.finish === "tool_calls") {
      fields.push(element("textarea", { rows: 2, "aria-label": `Result of ${call.name}`, placeholder: "What the function gives back" }));
      parts.push(fields.at(-1));
    }
    return element("details", { className: "call", open: true }, ...parts);
  });
  const send = fields.length
    ? [button("Send results", () => view.giveResults(fields.map((each) => each.value)), { className: "primary" })]
    : [];
  into.replaceChildren(...shown, ...send);
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function drawError(into, message, view) {
  into.hidden = !message.error;
  if (!message.error) return;
  const { message: text, requestId, status } = message.error;
  into.replaceChildren(element("p", {}, text));
  if (requestId) into.append(element("p", { className: "hint" }, `Request ${requestId}`));
  if (status === 401) into.append(button("Enter the API key", () => view.on.needKey()));
}

const ENDS = { length: "cut at the most tokens" };

function foot(message, last, view) {
  const facts = [];
  if (message.stopped) facts.push("stopped");
  if (ENDS[message.finish]) facts.push(ENDS[message.finish]);
  const { usage, timing } = message;
  if (usage) facts.push(`${usage.completion_tokens} tokens`);
  if (usage && timing && usage.completion_tokens > 1 && timing.restMs > 0) {
    facts.push(`${((usage.completion_tokens - 1) / (timing.restMs / 1000)).toPrecision(3)} a second`);
  }
  if (timing) facts.push(`first after ${(timing.firstMs / 1000).toFixed(2)} s`);
  const cached = usage?.prompt_tokens_details?.cached_tokens;
  if (cached) facts.push(`${Math.round((100 * cached) / usage.prompt_tokens)} % of the prompt from the cache`);
  const parts = [element("span", { className: "facts" }, facts.join(" · "))];
  if (message.content) parts.push(copyButton(() => message.content));
  if (last) parts.push(button(message.error ? "Try again" : "Regenerate", () => view.regenerate(), { className: "regenerate" }));
  return parts;
}
