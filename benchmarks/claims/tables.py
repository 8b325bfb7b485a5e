"""Tables of the page that stand below the statements."""

from collections.abc import Callable, Mapping
from statistics import mean

from .tasks import TASKS
from .training import PLAN, RATE, WIDTH, values
from .units import Record
from .variants import VARIANTS

Records = Mapping[str, Record]


def kinds(records: Records) -> str:
    """Every kind on every task: mean over the seeds, and the lowest and highest of them."""
    head = "| task | " + " | ".join(VARIANTS) + " |\n|---|" + "---|" * len(VARIANTS)
    rows = []
    for task in PLAN:
        cells = []
        for variant in VARIANTS:
            found = values(records, task, variant)
            scale, unit, digits = (1, "", 3) if task == "text" else (100, "", 1)
            low, high, middle = (scale * f(found) for f in (min, max, mean))
            cells.append(f"{middle:.{digits}f}{unit}<br>{low:.{digits}f} … {high:.{digits}f}")
        rows.append(f"| {task}, {'bits' if task == 'text' else '% right'} | " + " | ".join(cells) + " |")
    layers = ", ".join(f"{task} {PLAN[task][0]}" for task in PLAN)
    steps = ", ".join(f"{task} {PLAN[task][2]}" for task in PLAN)
    seeds = ", ".join(f"{task} {PLAN[task][3]}" for task in PLAN)
    told = "\n".join(f"- **{task}**: {(what.__doc__ or '').partition(chr(10))[0]}" for task, what in TASKS.items())
    parameters = sorted(
        {r["result"]["parameters"] / r["settings"]["layers"] for n, r in records.items() if n.startswith("training/")}
    )
    low, high = (f"{count:,.0f}" for count in (parameters[0], parameters[-1]))
    return f"""Mean over the seeds, and the lowest and highest of them, at lengths seen in training, on other examples.
For the text fewer bits are better.

{head}
{chr(10).join(rows)}

{told}

All have {low} to {high} parameters of attention a layer (width {WIDTH}), the same feed-forward, norms and readout, the
same examples in the same order, and equal steps ({steps}). Layers: {layers}. Seeds: {seeds}. One learning rate, {RATE},
tuned for none of them, and some still improve when the steps end: what is compared is what is learned in so many steps.
That three seeds agree in one direction happens by chance in 1 of 8 comparisons.
"""


TABLES: dict[str, list[Callable[[Records], str]]] = {"against": [kinds]}
