// The page: what the parts are wired to.
import { state } from "./api.js";
import { Chat } from "./chat.js";
import { by, element } from "./dom.js";
import { Monitor } from "./monitor.js";
import { Pictures } from "./pictures.js";
import { loadConversation, loadKey, loadSettings, saveConversation, saveKey, saveSettings } from "./store.js";

const LIVE_MS = 1000;
const QUIET_MS = 5000;
const FIELDS = ["system", "temperature", "top_p", "max_tokens", "tools", "model"];
const wide = matchMedia("(min-width: 70rem)");
const touch = matchMedia("(pointer: coarse)");
const prompt = by("prompt");

let settings = loadSettings();
let key = loadKey();
let vision = false;
let timer = 0;

function notice(text) {
  by("notice").textContent = text;
  by("notice").hidden = !text;
}

const pictures = new Pictures(by("pictures"), notice);
const monitor = new Monitor(by("tiles"), by("ranks"));
const chat = new Chat(by("log"), by("scroller"), loadConversation(), {
  settings: () => settings,
  key: () => key,
  save(messages) {
    if (!saveConversation(messages)) notice("This conversation is too large to be kept over a reload with its pictures.");
  },
  busy(yes) {
    by("send").hidden = yes;
    by("stop").hidden = !yes;
    document.body.classList.toggle("running", yes);
    by("empty").hidden = chat.messages.length > 0;
    if (!yes && document.activeElement === document.body) prompt.focus();
  },
  needKey: () => openSettings(by("api-key")),
});
by("empty").hidden = chat.messages.length > 0;

// Composer

function grow() {
  prompt.style.height = "auto";
  prompt.style.height = `${Math.min(prompt.scrollHeight + 2, innerHeight * 0.4)}px`;
}

function send() {
  const text = prompt.value.trim();
  if (chat.running || !(text || pictures.urls.length)) return;
  prompt.value = "";
  notice("");
  grow();
  chat.say(text, pictures.take());
}

by("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
by("stop").addEventListener("click", () => {
  chat.stop();
  prompt.focus();
});
prompt.addEventListener("input", grow);
prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || touch.matches) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && chat.running && !by("settings").open) chat.stop();
});
addEventListener("pagehide", () => {
  if (chat.running) saveConversation(chat.messages); // else another tab may have gone on with it
});
by("new").addEventListener("click", () => {
  chat.clear();
  pictures.take();
  notice("");
  by("empty").hidden = false;
  setView("chat");
  prompt.focus();
});

// Pictures

by("attach").addEventListener("click", () => by("files").click());
by("files").addEventListener("change", () => {
  pictures.add([...by("files").files]);
  by("files").value = "";
});
prompt.addEventListener("paste", (event) => {
  const files = [...event.clipboardData.files].filter((file) => file.type.startsWith("image/"));
  if (!vision || !files.length) return;
  event.preventDefault();
  pictures.add(files);
});
const carriesFiles = (event) => vision && event.dataTransfer?.types.includes("Files");
document.addEventListener("dragover", (event) => {
  if (!carriesFiles(event)) return;
  event.preventDefault();
  document.body.classList.add("dropping");
});
document.addEventListener("dragleave", (event) => {
  if (!event.relatedTarget) document.body.classList.remove("dropping");
});
document.addEventListener("drop", (event) => {
  document.body.classList.remove("dropping");
  if (!carriesFiles(event)) return;
  event.preventDefault();
  pictures.add([...event.dataTransfer.files]);
});

// Settings

function openSettings(field = null) {
  for (const name of FIELDS) by(name).value = settings[name] ?? "";
  by("enable_thinking").checked = settings.enable_thinking;
  by("api-key").value = key;
  by("settings").showModal();
  field?.focus();
}

by("open-settings").addEventListener("click", () => openSettings());
by("settings").addEventListener("close", () => {
  settings = { enable_thinking: by("enable_thinking").checked };
  for (const name of FIELDS) settings[name] = by(name).value;
  key = by("api-key").value.trim();
  saveSettings(settings);
  saveKey(key);
  poll();
});
by("settings").addEventListener("click", (event) => {
  if (event.target === by("settings")) by("settings").close(); // beside the form
});

// Theme and views

const THEMES = ["auto", "light", "dark"];

function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  localStorage.setItem("shardwise.theme", theme);
  by("theme").textContent = { auto: "◐ Auto", light: "◐ Light", dark: "◐ Dark" }[theme];
  by("theme").setAttribute("aria-label", `Theme: ${theme}`);
}

setTheme(document.documentElement.dataset.theme ?? "auto");
by("theme").addEventListener("click", () => {
  setTheme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme ?? "auto") + 1) % THEMES.length]);
});

function setView(view) {
  document.body.dataset.view = view;
  for (const each of ["chat", "live"]) by(`view-${each}`).setAttribute("aria-pressed", String(each === view));
  poll();
}

by("view-chat").addEventListener("click", () => setView("chat"));
by("view-live").addEventListener("click", () => setView("live"));
wide.addEventListener("change", () => poll());

// The server's state

function showStatus(kind, text) {
  by("status").dataset.kind = kind;
  if (by("status-text").textContent !== text) by("status-text").textContent = text;
}

function showModels(names) {
  by("model-row").hidden = names.length < 2;
  if ([...by("model").options].map((each) => each.value).join("\n") === names.join("\n")) return;
  by("model").replaceChildren(...names.map((name) => element("option", { value: name }, name)));
  if (!names.includes(settings.model)) settings.model = "";
}

async function poll() {
  clearTimeout(timer);
  if (document.hidden) return;
  const live = wide.matches || document.body.dataset.view === "live";
  try {
    const now = await state(key);
    const words = { ready: now.models[0], starting: `${now.models[0]} is starting`, draining: "Shutting down" };
    showStatus(now.status, words[now.status]);
    showModels(now.models);
    vision = now.vision;
    by("attach").hidden = !vision;
    by("live-notice").hidden = true;
    monitor.take(now);
  } catch (error) {
    showStatus("lost", error.status === 401 ? "API key needed" : "Not connected");
    by("live-notice").textContent = error.message;
    by("live-notice").hidden = false;
  }
  clearTimeout(timer);
  timer = setTimeout(poll, live ? LIVE_MS : QUIET_MS);
}

document.addEventListener("visibilitychange", () => poll());
poll();
grow();
if (!touch.matches) prompt.focus();
