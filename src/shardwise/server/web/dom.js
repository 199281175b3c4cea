// Making elements. Text goes in as text nodes only: nothing of a model's or a server's is ever parsed as HTML.

/** An element with properties, and children that are elements or texts; null children are left out. */
export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || name === "role") made.setAttribute(name, value);
    else made[name] = value;
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

export function button(text, onclick, properties = {}) {
  return element("button", { type: "button", onclick, ...properties }, text);
}

/** A button that puts what `text()` gives on the clipboard, and says so. */
export function copyButton(text) {
  const made = button("Copy", async () => {
    made.textContent = (await copy(text())) ? "Copied" : "Not allowed";
    setTimeout(() => (made.textContent = "Copy"), 1500);
  });
  return made;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Without HTTPS there is no clipboard but this old way.
    const area = element("textarea", { value: text, className: "offscreen" });
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

export const by = (id) => document.getElementById(id);
