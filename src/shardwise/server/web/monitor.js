// The live view: rates and latencies from counters that only grow, and what each rank's memory is for.
import { element } from "./dom.js";

const WINDOW_S = 60;
const RATE_S = 2;
const SVG = "http://www.w3.org/2000/svg";

/** Bytes in a unit that fits. */
export function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  while (count >= 1000 && power < units.length - 1) {
    count /= 1024;
    power += 1;
  }
  return `${count >= 100 || power === 0 ? Math.round(count) : count.toPrecision(3)} ${units[power]}`;
}

export function seconds(value) {
  if (value === null) return "–";
  return value < 1 ? `${(value * 1000).toPrecision(value < 0.1 ? 2 : 3)} ms` : `${value.toPrecision(3)} s`;
}

function number(value) {
  return value >= 100 ? Math.round(value).toLocaleString("en") : value >= 10 ? value.toFixed(0) : value.toFixed(1);
}

/** The q-quantile of what was observed between two histograms of the server, within its buckets; null if nothing was. */
export function quantile(now, before, q) {
  const counts = now.counts.map((count, i) => count - (before?.counts[i] ?? 0));
  const all = counts.at(-1);
  if (all <= 0) return null;
  const i = counts.findIndex((count) => count >= q * all);
  const low = i ? now.bounds_s[i - 1] : 0;
  const high = now.bounds_s[i] ?? low;
  const under = i ? counts[i - 1] : 0;
  return low + ((high - low) * (q * all - under)) / Math.max(counts[i] - under, 1);
}

export class Monitor {
  constructor(tiles, ranks) {
    Object.assign(this, { tiles, ranks, past: [] });
    this.made = new Map();
  }

  /** Take in a state of the server's, and show it. */
  take(state) {
    const last = this.past.at(-1);
    if (last && (state.at_s < last.at_s || state.counters.generated_tokens < last.counters.generated_tokens)) this.past = [];
    this.past.push(state);
    while (state.at_s - this.past[0].at_s > WINDOW_S) this.past.shift();
    this.drawTiles(state);
    this.drawRanks(state);
  }

  /** Of a counter, a second, over the last moments before the state numbered `at`. */
  rate(name, at = this.past.length - 1) {
    const end = this.past[at];
    let i = at;
    while (i > 0 && end.at_s - this.past[i].at_s < RATE_S) i -= 1;
    const took_s = end.at_s - this.past[i].at_s;
    return took_s > 0 ? (end.counters[name] - this.past[i].counters[name]) / took_s : 0;
  }

  latency(state, name) {
    const first = this.past[0].latency[name];
    const recent = quantile(state.latency[name], first, 0.5) !== null;
    const of = (q) => quantile(state.latency[name], recent ? first : null, q);
    const since = of(0.5) === null ? "none yet" : recent ? "last minute" : "since the start";
    return [seconds(of(0.5)), `95 % under ${seconds(of(0.95))}`, since];
  }

  drawTiles(state) {
    const { counters, requests, kv_tokens: kv, state_rows: rows } = state;
    const speeds = this.past.map((_, i) => this.rate("generated_tokens", i));
    this.tile("Generated", `${number(speeds.at(-1))} tokens/s`, [`${counters.generated_tokens.toLocaleString("en")} in all`], speeds);
    this.tile("Prompts", `${number(this.rate("prompt_tokens"))} tokens/s`, [`${counters.prompt_tokens.toLocaleString("en")} in all`]);
    const [first, firstMost, firstSince] = this.latency(state, "first_token");
    this.tile("Time to first token", first, [firstMost, firstSince]);
    const [next, nextMost, nextSince] = this.latency(state, "next_token");
    this.tile("Between tokens", next, [nextMost, nextSince]);
    const share = counters.prompt_tokens ? counters.cached_tokens / counters.prompt_tokens : 0;
    this.tile("Cache hits", `${(100 * share).toFixed(0)} %`, ["of prompt tokens, since the start"]);
    const waits = requests.waiting ? `${requests.waiting} waiting` : "none waiting";
    this.tile("Requests", `${requests.running} running`, [waits, `${requests.preemptions} preempted so far`]);
    this.tile("KV cache", kv.total ? `${((100 * kv.used) / kv.total).toFixed(0)} %` : "–", [
      `${kv.used.toLocaleString("en")} of ${kv.total.toLocaleString("en")} tokens`,
    ]);
    this.tile("State rows", `${rows.used} of ${rows.total}`, ["one a request in the engine"]);
  }

  tile(name, value, notes, line = null) {
    let made = this.made.get(name);
    if (!made) {
      made = { value: element("p", { className: "value" }), notes: element("p", { className: "hint" }) };
      const box = element("div", { className: "tile" }, element("h3", {}, name), made.value, made.notes);
      if (line) {
        made.svg = document.createElementNS(SVG, "svg");
        made.svg.setAttribute("viewBox", `0 0 ${WINDOW_S} 20`);
        made.svg.setAttribute("preserveAspectRatio", "none");
        made.svg.setAttribute("aria-hidden", "true");
        made.path = document.createElementNS(SVG, "path");
        made.svg.append(made.path);
        box.append(made.svg);
      }
      this.made.set(name, made);
      this.tiles.append(box);
    }
    made.value.textContent = value;
    made.notes.textContent = notes.filter(Boolean).join(" · ");
    if (line) {
      const most = Math.max(...line, 1);
      const end_s = this.past.at(-1).at_s;
      const points = line.map((each, i) => `${(WINDOW_S - (end_s - this.past[i].at_s)).toFixed(1)} ${(19 - (18 * each) / most).toFixed(1)}`);
      made.path.setAttribute("d", `M${points.join("L")}`);
    }
  }

  drawRanks(state) {
    this.ranks.replaceChildren(...state.ranks.map(rankCard));
  }
}

/** [name, bytes, class of style] of all that a rank's memory is for. */
export function segments(rank) {
  const parts = Object.entries(rank.weights_bytes).map(([kind, size]) => [kind, size, `weights-${kind}`]);
  for (const [name, held] of [["state", rank.state_bytes], ["KV", rank.kv_bytes]]) {
    parts.push([`${name}, used`, held.used, `${name}-used`], [`${name}, free`, held.total - held.used, `${name}-free`]);
  }
  const held = parts.reduce((sum, [, size]) => sum + size, 0);
  if (rank.memory_bytes === null) return parts;
  if (rank.gpu_memory_used_bytes === null) return [...parts, ["unassigned", Math.max(rank.memory_bytes - held, 0), "free"]];
  const other = Math.max(rank.gpu_memory_used_bytes - held, 0);
  return [...parts, ["work space", other, "other"], ["free", Math.max(rank.memory_bytes - held - other, 0), "free"]];
}

function rankCard(rank) {
  const parts = segments(rank).filter(([, size]) => size > 0);
  const all = parts.reduce((sum, [, size]) => sum + size, 0);
  const bar = element("div", { className: "memory", "aria-hidden": "true" });
  const list = element("dl", { className: "legend" });
  for (const [name, size, kind] of parts) {
    const piece = element("span", { className: kind, title: `${name}: ${bytes(size)}` });
    piece.style.flexGrow = String(size / all);
    bar.append(piece);
    list.append(element("div", {}, element("dt", {}, element("span", { className: `key ${kind}`, "aria-hidden": "true" }), name), element("dd", {}, bytes(size))));
  }
  const weights = Object.values(rank.weights_bytes).reduce((sum, size) => sum + size, 0);
  const facts = [`${bytes(weights)} of weights`, `${bytes(rank.memory_bytes ?? all)} ${rank.memory_bytes === null ? "held" : "in all"}`];
  const head = element("header", {}, element("h3", {}, `Rank ${rank.rank}`, element("small", {}, rank.device || "on another host")), element("p", { className: "hint" }, facts.join(" · ")));
  const card = element("section", { className: "rank", "aria-label": `Rank ${rank.rank}` }, head);
  if (rank.gpu_utilisation !== null) {
    const meter = element("div", { className: "busy", "aria-hidden": "true" }, element("span"));
    meter.firstChild.style.width = `${100 * rank.gpu_utilisation}%`;
    card.append(element("p", { className: "use" }, `Busy ${Math.round(100 * rank.gpu_utilisation)} %`, meter));
  }
  card.append(bar, list);
  return card;
}
