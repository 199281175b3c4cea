"""The plan as one page without any other file: readable on paper, in light and in dark."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

GIB = 1 << 30
HUES = {
    "vocabulary": 300, "attention": 215, "delta": 185, "experts": 40, "mlp": 120, "vision": 0, "norms": 60,
    "other": 80, "shortlist": 330, "state": 250, "KV cache": 150,
}  # fmt: skip
STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --line: #d5dae1; --empty: #eceff3; --good: #0a7a3f; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8ee; --paper: #14171b; --line: #353b44; --empty: #262b32; --good: #5fd08f; }
}
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
  max-width: 70rem; padding: 0 1rem; }
h1 { font-size: 1.4rem; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .8rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } tr.chosen td { font-weight: 600; color: var(--good); }
.bar { display: flex; height: 2rem; background: var(--empty); border-radius: 4px; overflow: hidden; }
.bar span { display: block; } .swatch { display: inline-block; width: .9em; height: .9em; border-radius: 2px; }
.figures { display: flex; gap: 2.5rem; flex-wrap: wrap; } .figures b { display: block; font-size: 1.6rem; }
li { margin: .2rem 0; }
"""


def page(plan: Mapping[str, Any]) -> str:
    """The page of a plan, given as the dictionary that `--json` prints."""
    name = escape(str(plan["model"]))
    speed = f"{plan['tokens_per_s']:.0f}" if plan["tokens_per_s"] is not None else "unknown"
    figures = (
        (speed, f"tokens/s predicted, limited by {plan['limited_by']}"),
        (f"{plan['context_tokens']:,}", f"tokens for each of {plan['requests']} request(s)"),
        (f"{plan['kv_tokens']:,}", f"tokens of KV cache, limited by rank {plan['kv_limited_by_rank']}"),
    )
    tiles = "".join(f"<div><b>{escape(value)}</b>{escape(what)}</div>" for value, what in figures)
    reasons = "".join(f"<li>{escape(line)}</li>" for line in plan["reasons"])
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>Plan of {name}</title><style>{STYLE}</style></head>'
        f"<body><h1>{name} over {plan['ranks']} rank(s)</h1><div class=figures>{tiles}</div>"
        f"<h2>Memory</h2>{_bars(plan)}<h2>Bytes</h2>{_held(plan)}"
        f"<h2>Splits, best first</h2>{_candidates(plan['candidates'])}<h2>Why</h2><ul>{reasons}</ul></body></html>\n"
    )


def _parts(plan: Mapping[str, Any], rank: Mapping[str, Any]) -> dict[str, float]:
    """Bytes of everything on a rank, by kind."""
    state = (plan["max_num_seqs"] + 1 + plan["snapshot_rows"]) * rank["state_row_bytes"]
    return {**rank["weights_bytes"], "state": state, "KV cache": plan["kv_tokens"] * rank["kv_token_bytes"]}


def _bars(plan: Mapping[str, Any]) -> str:
    largest, kinds, rows = max(rank["memory_bytes"] for rank in plan["each"]) or 1, dict[str, None](), list[str]()
    for rank in plan["each"]:
        parts = _parts(plan, rank)
        kinds |= dict.fromkeys(parts)
        spans = "".join(
            f'<span title="{kind}: {size / GIB:.2f} GiB" '
            f'style="width:{100 * size / largest:.3f}%;{_fill(kind)}"></span>'
            for kind, size in parts.items()
        )
        rows.append(
            f"<p>rank {rank['rank']}: {escape(rank['device'])}, {rank['memory_bytes'] / GIB:.1f} GiB to use, "
            f'{rank["idle_bytes"] / GIB:.1f} idle</p><div class=bar style="width:'
            f'{100 * rank["memory_bytes"] / largest:.2f}%">{spans}</div>'
        )
    legend = " &nbsp; ".join(f'<span class=swatch style="{_fill(kind)}"></span> {kind}' for kind in kinds)
    return "".join(rows) + f"<p>{legend}</p>"


def _fill(kind: str) -> str:
    return f"background:hsl({HUES.get(kind, 0)} 55% 52%)"


def _held(plan: Mapping[str, Any]) -> str:
    ranks = plan["each"]
    kinds = dict.fromkeys(kind for rank in ranks for kind in rank["weights_bytes"])
    rows = [[kind, *(f"{rank['weights_bytes'].get(kind, 0) / GIB:.3f}" for rank in ranks)] for kind in kinds]
    rows.append(["all weights", *(f"{rank['total_weights_bytes'] / GIB:.3f}" for rank in ranks)])
    rows.append(["rows of state for snapshots", *(str(plan["snapshot_rows"]) for _ in ranks)])
    rows.append(["state of a request, MiB", *(f"{rank['state_row_bytes'] / (1 << 20):.2f}" for rank in ranks)])
    rows.append(["KV, bytes a token", *(f"{rank['kv_token_bytes']:.0f}" for rank in ranks)])
    rows.append(["KV tokens that fit", *(f"{rank['kv_tokens']:,}" for rank in ranks)])
    return _table(["GiB", *(f"rank {rank['rank']}" for rank in ranks)], rows)


def _candidates(candidates: Sequence[Mapping[str, Any]]) -> str:
    groups = dict.fromkeys(group for one in candidates for group in one["shares"])
    rows = [
        [
            one["name"],
            ",".join(map(str, one["devices"])),
            *(":".join(f"{100 * share:.0f}" for share in one["shares"].get(group, ())) for group in groups),
            "unknown" if one["tokens_per_s"] is None else f"{one['tokens_per_s']:.1f}",
            f"{one['kv_tokens']:,}" if one["fits"] else "does not fit",
            one["limited_by"],
        ]
        for one in candidates
    ]
    chosen = [n for n, one in enumerate(candidates) if one["chosen"]]
    heads = ["split", "devices", *(f"{group}, %" for group in groups), "tokens/s", "KV tokens", "limited by"]
    return _table(heads, rows, chosen)


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]], marked: Sequence[int] = ()) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in heads)
    body = "".join(
        f"<tr{' class=chosen' if n in marked else ''}>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>"
        for n, row in enumerate(rows)
    )
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'
