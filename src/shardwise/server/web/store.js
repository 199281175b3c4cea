// What outlives a reload: the conversation and the settings in localStorage, the key in sessionStorage.

const CONVERSATION = "shardwise.conversation";
const SETTINGS = "shardwise.settings";
const KEY = "shardwise.key";

function read(storage, name, otherwise) {
  try {
    return JSON.parse(storage.getItem(name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

/** Messages: {role: "user" | "assistant" | "tool", content, ...}; see chat.js. */
export function loadConversation() {
  const messages = read(localStorage, CONVERSATION, []);
  return Array.isArray(messages) ? messages.filter((each) => typeof each?.content === "string") : [];
}

/** False if they were too large to be kept whole; then they are kept without pictures. */
export function saveConversation(messages) {
  for (const pictures of [true, false]) {
    const kept = pictures ? messages : messages.map((each) => ({ ...each, pictures: undefined }));
    try {
      localStorage.setItem(CONVERSATION, JSON.stringify(kept));
      return pictures;
    } catch {
      continue; // the quota, of a few MiB
    }
  }
  return false;
}

export const loadSettings = () => ({ enable_thinking: true, ...read(localStorage, SETTINGS, {}) });
export const saveSettings = (settings) => localStorage.setItem(SETTINGS, JSON.stringify(settings));
export const loadKey = () => sessionStorage.getItem(KEY) ?? "";
export const saveKey = (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY));
