"""What tokenmill claims for a GPU, each claim as a line with its value and yes or no."""

from __future__ import annotations

from collections.abc import Iterator

from bench.gpu_check.table import Line, Row, Table

ROW = Row("=", "claim", 0, "", proves=False)
"""A claim that does not hold is no wrong result: the exit status stays 0."""


def claims(table: Table) -> Iterator[tuple[Row, Line]]:
    """Yield a line for each claim whose numbers were measured."""
    attention = {
        key: x for key, x in table.values("9").items() if key.startswith("share ") and not key.startswith("share 1 ")
    }
    yield from _claim("decode attention >= 80 % of a copy's bandwidth", attention, 0.8, "{:.0%}")
    steps = {key: x for key, x in table.values("10").items() if key.startswith("floor 8B ")}
    yield from _claim("8B decode step >= 80 % of the floor", steps, 0.8, "{:.0%}")
    idle = {key: x for key, x in table.values("10").items() if key.startswith("idle ") and key.endswith(" 128")}
    yield from _claim("device idle <= 5 % at 128 running", idle, 0.05, "{:.1%}", at_most=True)
    rates = table.values("12")
    ahead = {
        f"ahead {name}": rates[f"rate {name} tokenmill"] / rates[f"rate {name} generate_batch"]
        for name in ("1B", "8B")
        if {f"rate {name} tokenmill", f"rate {name} generate_batch"} <= rates.keys()
    }
    yield from _claim("tokens/s >= 1.5 x generate_batch", ahead, 1.5, "{:.2f} x")


def _claim(
    what: str, values: dict[str, float], limit: float, form: str, at_most: bool = False
) -> Iterator[tuple[Row, Line]]:
    """Yield the line of a claim that must hold for all of its values."""
    if not values:
        yield ROW, Line(what, "not measured", "skipped")
        return
    holds = all(x <= limit if at_most else x >= limit for x in values.values())
    detail = ", ".join(f"{key.partition(' ')[2]}: {form.format(x)}" for key, x in values.items())
    yield ROW, Line(what, detail, "yes" if holds else "no", values)
