"""A plan for the terminal: who holds what, as sums to check, and why not otherwise. Beside view.py a user of rich."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from cluster.plan.placement import Option, Rank, gb
from cluster.plan.planner import NAMES, Plan
from cluster.show.view import show


def show_plan(model: str, plan: Plan) -> None:
    """Print all of it."""
    info, wishes, chosen = plan.info, plan.wishes, plan.chosen
    source = "the weights' headers" if info.measured else "config.json"
    tell(f"{model}: {info.family}, {len(info.layers)} layers, weights {gb(info.weights)} (from {source})")
    tell(f"KV for {wishes.slots} x {wishes.context} tokens: {gb(info.kv_bytes(wishes.context) * wishes.slots)}")
    over = f" over {chosen.backend}" if chosen.backend else ""
    tell(f"\n{NAMES[chosen.strategy]}{over}:")
    show(sums_table(chosen))
    for text in traffic_lines(chosen):
        tell(text)
    tell(f"About {chosen.tokens_per_s:.3g} tokens/s for one stream, estimated from memory bandwidth.")
    if plan.others:
        tell("\nNot chosen:")
    for option in plan.others:
        tell(f"  {NAMES[option.strategy]}{_where(option)}: {option.why_not}")
    for name, why in plan.left_out:
        tell(f"  {name} is left out: {why}")
    for warning in plan.warnings:
        tell(f"warning: {warning}")


def tell(text: str) -> None:
    show(Text(text))


def sums_table(option: Option) -> Table:
    """A column per rank: weights + KV + activations + reserve = needs, beside what the GPU may hold."""
    table = Table(box=None, pad_edge=False, header_style="")
    table.add_column("")
    for rank in option.ranks:
        table.add_column(Text(f"rank {rank.rank}"), justify="right")
    budgets = [rank.budget for rank in option.ranks]
    rows = {
        "host": [rank.name for rank in option.ranks],
        "layers": [_part(option, rank) for rank in option.ranks],
        "  weights": [gb(budget.weights) for budget in budgets],
        "+ KV": [gb(budget.kv) for budget in budgets],
        "+ activations": [gb(budget.activations) for budget in budgets],
        "+ reserve": [gb(budget.reserve) for budget in budgets],
        "= needs": [gb(budget.needs) for budget in budgets],
        "has": [gb(budget.limit) for budget in budgets],
        "spare": [gb(budget.spare) for budget in budgets],
        "per token": [f"{1e3 * rank.seconds:.1f} ms" for rank in option.ranks],
    }
    for title, cells in rows.items():
        table.add_row(title, *map(Text, cells))
    return table


def _part(option: Option, rank: Rank) -> str:
    if option.strategy == "tensor":
        return f"1/{len(option.ranks)} of each"
    return "all" if option.strategy == "single" else f"{rank.start}-{rank.stop - 1} ({rank.stop - rank.start})"


def traffic_lines(option: Option) -> list[str]:
    """What one token sends over each link."""
    lines = []
    for link in option.traffic:
        cables = f"{link.cables} cable{'s'[: link.cables != 1]}" if link.cables else "TCP"
        sender, receiver = option.ranks[link.sender].name, option.ranks[link.receiver].name
        lines.append(f"{sender} -> {receiver}: {link.bytes_per_token:,} bytes per token ({cables})")
    return lines


def _where(option: Option) -> str:
    if not option.ranks:
        return ""
    over = f" over {option.backend}" if option.backend else ""
    counts = (
        f", layers {'/'.join(str(r.stop - r.start) for r in option.ranks)}" if option.strategy == "pipeline" else ""
    )
    return f" on {', '.join(rank.name for rank in option.ranks)}{over}{counts}"
