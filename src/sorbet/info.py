"""What `sorbet info` says of an artefact."""

import dataclasses
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .artifact import FORMAT_VERSION, Artifact
from .kernels import describe as describe_kernels
from .widths import accumulator_widths


def describe(artifact: Artifact, file_bytes: int | None = None, widths: bool = False) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "stage": artifact.provenance.get("stage"),
        "shape": dataclasses.asdict(artifact.shape),
        "labels": list(artifact.labels),
        "problem_type": artifact.problem_type,
        "bytes": {"file": file_bytes, **artifact.nbytes()},
        "widest_accumulator_bits": max(width.bits for width in accumulator_widths(artifact)),
        "kernels": describe_kernels(),
        "provenance": artifact.provenance,
    }
    if widths:
        facts["widths"] = [
            {"name": w.name, "low": w.low, "high": w.high, "bits": w.bits, "limit": w.limit}
            for w in accumulator_widths(artifact)
        ]
    return facts


def show(facts: dict[str, Any], out: Console) -> None:
    shape = facts["shape"]
    rows = {
        "model": f"{shape['num_layers']} layers, hidden {shape['hidden_size']}, {shape['num_heads']} heads, "
        f"FFN {shape['intermediate_size']}, vocabulary {shape['vocab_size']:,}, {shape['max_positions']} positions",
        "task": f"{facts['problem_type']}: {_shorten(facts['labels'])}",
        "stage": f"{facts['stage']}: 1-bit weights, PTsoftmax, {shape['norm']} in {shape['norm_groups']} groups",
        "spikes": f"T = {shape['num_steps']}, {shape['encoding']} (pooler {shape['pooler_encoding']})",
        "size": f"{(facts['bytes']['file'] or 0) / 1e6:.2f} MB: "
        + ", ".join(f"{part} {size / 1e3:,.0f} kB" for part, size in facts["bytes"].items() if part != "file"),
        "accumulators": f"at most {facts['widest_accumulator_bits']} bits (see --widths)",
        "kernels": facts["kernels"],
        "format": f"version {facts['format_version']}",
    }
    grid = Table(box=None, show_header=False, pad_edge=False)
    grid.add_column(style="bold")
    grid.add_column()
    rows |= {f"· {name}": value for name, value in facts["provenance"].items() if name != "stage"}
    for name, value in rows.items():
        grid.add_row(printable(name), printable(value))
    out.print(grid)
    if "widths" in facts:
        out.print(_width_table(facts["widths"]))


def printable(value: Any) -> Text:
    """Text from a file as it is: no markup, and no control characters that would steer the terminal."""
    return Text("".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(value)))


def _shorten(labels: list[str]) -> str:
    return ", ".join(labels[:8]) + (f", … ({len(labels)} labels)" if len(labels) > 8 else "")


def _width_table(widths: list[dict[str, Any]]) -> Table:
    made = Table(title="accumulators, worst case over all inputs", title_justify="left", box=None, pad_edge=False)
    for name, justify in (("where", "left"), ("from", "right"), ("to", "right"), ("bits", "right")):
        made.add_column(name, justify=justify)  # type: ignore[arg-type]
    for w in widths:
        made.add_row(w["name"], f"{w['low']:,}", f"{w['high']:,}", str(w["bits"]))
    return made
