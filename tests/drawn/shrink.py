"""Finds a smaller model that fails in the same way, by leaving out one part at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from tests.drawn.verdict import Verdict

_MOST_TRIALS = 60


def shrunk(verdict: Verdict, judged: Callable[[str], Verdict]) -> Verdict:
    """Returns the verdict on the smallest source found with the same outcome and cause.

    Args:
        verdict: of a model that failed.
        judged: judges a source.
    """
    cause, trials = _cause(verdict), 0
    smallest = verdict
    progress = True
    while progress and trials < _MOST_TRIALS:
        progress = False
        for source in _smaller(smallest.source):
            trials += 1
            if trials > _MOST_TRIALS:
                break
            other = judged(source)
            if _cause(other) == cause:
                smallest, progress = other, True
                break
    return smallest


def _cause(verdict: Verdict) -> tuple[str, str]:
    """What must stay the same: the outcome, and of an error its text without names and numbers."""
    # Words with a digit, an underscore or a slash name nodes, tensors and sizes.
    words = [word for word in verdict.reason.split() if not re.search(r"[\d_/]", word)]
    return verdict.outcome, "" if verdict.outcome == "wrong" else " ".join(words)


def _smaller(source: str) -> Iterator[str]:
    """Sources with fewer lines, those with the fewest first. Many are no valid models, which is cheap to find out."""
    lines = source.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("    def forward(self"))
    body = range(start + 2, len(lines))
    for count in (8, 4, 2, 1):
        for first in body:
            last = first + count
            if last < len(lines) and not any("return" in line and "lambda" not in line for line in lines[first:last]):
                candidate = _without_unused(lines[:first] + lines[last:])
                if _is_python(candidate):
                    yield candidate
    for index in body:
        stripped = lines[index].lstrip()
        if stripped.endswith(":") and stripped.startswith(("if ", "with ", "for ")):
            yield _without_unused(_unwrapped(lines, index))
    if lines[-1].strip() != "return h":
        end = next(index for index in body if "loss = " in lines[index] or "return" in lines[index])
        yield _without_unused([*lines[:end], "        return h"])


def _unwrapped(lines: list[str], index: int) -> list[str]:
    """The lines without a statement that others are indented under, which stay."""
    indent = len(lines[index]) - len(lines[index].lstrip())
    result = lines[:index]
    inside = True
    for line in lines[index + 1 :]:
        inside = inside and len(line) - len(line.lstrip()) > indent
        result.append(line[4:] if inside else line)
    return result


def _without_unused(lines: list[str]) -> str:
    """The source without attributes, globals and arguments that forward no longer uses."""
    start = next(index for index, line in enumerate(lines) if line.startswith("    def forward(self"))
    head, body = lines[:start], "\n".join(lines[start + 1 :])
    names = ["x", *(name for name in ("ids", "labels") if re.search(rf"\b{name}\b", body))]
    kept = [
        line
        for line in head
        if not (match := re.match(r" {8}self\.(?:register_buffer\(')?(\w+)", line))
        or re.search(rf"self\.{match[1]}\b", body)
        or any(re.search(rf"self\.{match[1]}\b", other) for other in head if other is not line)
    ]
    text = "\n".join(kept)
    if "nn." not in text.partition("super().__init__()")[2]:
        kept.append("        self.scale = nn.Parameter(torch.ones(8))")
        body = body.replace("h = x", "h = x * self.scale", 1)
    while kept and not kept[-1].strip():
        kept.pop()
    return "\n".join([*kept, "", f"    def forward(self, {', '.join(names)}):", body, ""])


def _is_python(source: str) -> bool:
    try:
        compile(source, "net.py", "exec")
    except SyntaxError:
        return False
    return True
