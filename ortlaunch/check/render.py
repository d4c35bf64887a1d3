"""Prints the report: as a table on a terminal, and otherwise as plain text with the same words."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ortlaunch.base.text import counted

_STYLE = {"ok": "green", "warning": "yellow", "failed": "red", "skipped": "dim", "not reached": "dim"}
_MOST = 6
"""Number of list entries that are printed; the JSON contains all."""

Part = dict[str, Any] | None


def render(report: dict[str, Any], console: Console) -> None:
    """Prints a report that `ortlaunch.check.report.to_json` returned."""
    parts = {
        "structure": _structure(report["structure"]),
        "export": _export(report["export"]),
        "parity": _parity(report["parity"]),
        "randomness": _randomness(report["randomness"]),
        "cost": _cost(report["cost"]),
    }
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    title = f"{report['model']} on {report['data']}, {report['device']}, {report['precision']} ({versions})"
    word, style = ("fit", "bold green") if report["fit"] else ("not fit", "bold red")
    if not console.is_terminal:
        _print_plain(title, report, parts, word, console)
        return
    table = Table(box=box.SIMPLE_HEAD, title=Text(title), title_justify="left", show_header=False)
    table.add_column()
    table.add_column()
    table.add_column(overflow="fold")
    for name, lines in parts.items():
        status = _status(report[name])
        table.add_row(Text(name, "bold"), Text(status, _STYLE[status]), Text("\n".join(lines)))
    console.print(table)
    console.print(Text.assemble((f"{word} for ONNX Runtime: ", style), report["verdict"]))


def _print_plain(title: str, report: dict[str, Any], parts: dict[str, list[str]], word: str, console: Console) -> None:
    lines = [title, ""]
    for name, details in parts.items():
        lines.append(f"{name:<11} {_status(report[name])}")
        lines += [f"    {detail}" for detail in details]
    lines += ["", f"{word} for ONNX Runtime: {report['verdict']}"]
    console.out("\n".join(lines), highlight=False)


def _status(part: Part) -> str:
    return "not reached" if part is None else str(part["status"])


def _structure(part: dict[str, Any]) -> list[str]:
    lines = list(part["problems"])
    if part["parameters"]:
        lines.append(f"{counted(part['parameters'], 'parameter')}, {counted(part['buffers'], 'buffer')}")
    for word in ("inputs", "outputs"):
        if part[word]:
            lines.append(f"{word}: " + ", ".join(f"{one['name']} {one['shape']} {one['dtype']}" for one in part[word]))
    lines += _few(
        [f"not registered, so a constant of the export: {one['name']} {one['shape']}" for one in part["unregistered"]]
    )
    return lines


def _export(part: Part) -> list[str]:
    if part is None:
        return []
    lines = [f"exported in {part['seconds']:.1f} s" if part["succeeded"] else f"failed: {part['error']}"]
    lines += _few(
        [
            f"unsupported: {one['name']} in {one['module'] or 'the model itself'} {one['location']}  {one['statement']}"
            for one in part["unsupported_operators"]
        ]
    )
    lines += _few(
        [f"{one['location']}  {one['statement']}  ({_EFFECT[one['effect']]})" for one in part["tracer_warnings"]]
    )
    if part["succeeded"] and not part["comparable"]:
        lines.append("the outputs are random with dropout off too: nothing was compared")
    for kind in ("fresh_data", "batch_size", "sequence_length"):
        probes = [probe for probe in part["probes"] if probe["kind"] == kind]
        if probes:
            shapes = ", ".join(f"{probe['shape']}{_gap(probe)}" for probe in probes)
            lines.append(f"{kind.replace('_', ' ')}: {shapes}")
    lines += [f"REFUSED at a run's start ({one['kind']}): {one['what']}" for one in part["refused"]]
    return lines


_EFFECT = {
    "none": "harmless: it decided the same throughout",
    "decides_otherwise": "decides otherwise on other data, outputs agree",
    "changes_outputs": "FROZEN: outputs differ where it would decide otherwise",
    "decided_by_chance": "FROZEN: decided by chance in PyTorch",
}


def _gap(probe: dict[str, Any]) -> str:
    if probe["message"]:
        return f" FAILS: {probe['message']}"
    if not probe["differs"]:
        return " same, by a graph of its own" if probe["own_graph"] else " same"
    error = "not comparable" if probe["error"] is None else f"{probe['error']:.1e}"
    return f" DIFFERS ({probe['output']} {error})"


def _parity(part: Part) -> list[str]:
    if part is None or part["status"] == "skipped":
        return []
    if part["error"]:
        return [f"failed: {part['error']}"]
    lines = [
        f"{name:<10} {_comparison(part[name])}" + (f", after {counted(part['steps'], 'step')}" if later else "")
        for name, later in (
            ("loss", False),
            ("outputs", False),
            ("gradients", False),
            ("parameters", True),
            ("buffers", True),
        )
    ]
    return lines + _few([f"STALE buffer: {name}" for name in part["stale_buffers"]])


def _comparison(group: dict[str, Any]) -> str:
    if group["count"] == 0:
        return "none"
    if group["largest"] is None:
        return f"{group['count']}, DIFFERENT: {', '.join(one['name'] for one in group['differing'][:_MOST])}"
    text = (
        f"{group['count']}, largest relative error {group['largest_error']:.1e} ({group['largest']}), "
        f"tolerance {group['tolerance']:.0e}"
    )
    if group["from_exact"] is not None and group["eager_from_exact"] is not None:
        text += f", from fp64 {group['from_exact']:.1e} (eager's own {group['eager_from_exact']:.1e})"
    if group["differing"]:
        text += f", DIFFERENT: {', '.join(one['name'] for one in group['differing'][:_MOST])}"
    for name, (expected, actual) in list(group["dtypes"].items())[:_MOST]:
        text += f", DTYPE: {name} is {actual} instead of {expected}"
    return text


def _randomness(part: Part) -> list[str]:
    if part is None or part["status"] == "skipped":
        return []
    if part["problems"]:
        return list(part["problems"])
    if not part["expected"]:
        return ["none in train mode, none in evaluation"]
    return ["active in train mode, different at every step and on every rank, off in evaluation"]


def _cost(part: Part) -> list[str]:
    if part is None or not part["backends"]:
        return []
    lines = [f"batch of {part['batch_size']}, {counted(part['threads'], 'thread')}"]
    for name, one in part["backends"].items():
        if one["error"]:
            lines.append(f"{name:<8} {one['error']}")
        else:
            lines.append(
                f"{name:<8} {one['step_seconds']:.4f} s/step, {one['peak_memory_gib']:.2f} GiB at most, "
                f"{one['start_seconds']:.1f} s to start"
            )
    if part["export_seconds"] is not None:
        pays = part["pays_off_after_steps"]
        after = "never pays for itself" if pays is None else f"has paid for itself after {counted(pays, 'step')}"
        lines.append(f"ORT's export of {part['export_seconds']:.1f} s {after} against eager")
    return lines


def _few(lines: list[str]) -> list[str]:
    return lines if len(lines) <= _MOST else [*lines[:_MOST], f"and {len(lines) - _MOST} more (--format json)"]
