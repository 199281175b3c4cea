// A small part of Markdown, as elements: code blocks, tables as they are, headings, inline code, bold.
import { copyButton, element } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)[^`]*$/;

/** Blocks of `text` in order: {kind: "code" | "table" | "heading" | "text", lines, language}. */
export function blocks(text) {
  const found = [];
  let fence = ""; // of the code block that is open
  let apart = true; // the next line begins a block of its own
  const add = (kind, line) => {
    if (!apart && found.at(-1)?.kind === kind && kind !== "heading") found.at(-1).lines.push(line);
    else found.push({ kind, lines: [line] });
    apart = false;
  };
  for (const line of text.split("\n")) {
    const mark = FENCE.exec(line);
    if (fence) {
      if (mark && !mark[2] && mark[1].startsWith(fence)) [fence, apart] = ["", true];
      else found.at(-1).lines.push(line);
    } else if (mark) {
      fence = mark[1];
      found.push({ kind: "code", lines: [], language: mark[2] });
    } else if (line.trim() === "") apart = true;
    else if (/^#{1,6} /.test(line)) add("heading", line.replace(/^#+ +/, ""));
    else add(/^\s*\|.*\|\s*$/.test(line) ? "table" : "text", line);
  }
  return found;
}

function inline(text) {
  const parts = [];
  let end = 0;
  for (const match of text.matchAll(/(`+)(.+?)\1(?!`)|\*\*(\S(?:.*?\S)?)\*\*/gs)) {
    parts.push(text.slice(end, match.index));
    parts.push(match[1] ? element("code", {}, match[2]) : element("strong", {}, ...inline(match[3])));
    end = match.index + match[0].length;
  }
  parts.push(text.slice(end));
  return parts;
}

function render(block) {
  const source = block.lines.join("\n");
  if (block.kind === "code") {
    const name = element("span", {}, block.language || "code");
    const bar = element("div", { className: "bar" }, name, copyButton(() => source));
    return element("div", { className: "code" }, bar, element("pre", { tabIndex: 0 }, element("code", {}, source)));
  }
  if (block.kind === "table") return element("pre", { className: "table", tabIndex: 0 }, source);
  if (block.kind === "heading") return element("p", { className: "heading" }, ...inline(source));
  return element("p", {}, ...inline(source));
}

/** Show `text` in `into`. Blocks that are there already stay, so that a selection lives while an answer grows. */
export function show(into, text) {
  const wanted = blocks(text);
  const there = [...into.children];
  wanted.forEach((block, i) => {
    const key = JSON.stringify(block);
    if (there[i]?.blockKey === key) return;
    const made = render(block);
    made.blockKey = key;
    if (there[i]) there[i].replaceWith(made);
    else into.append(made);
  });
  for (const left of there.slice(wanted.length)) left.remove();
}
