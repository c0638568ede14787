"""The output of a builder -> progress events: a new step is a stage, the rest are lines."""

from __future__ import annotations

import json
import re

from envforge.image.values import Event, Progress

_STEP = re.compile(r"^#\d+ \[(?P<where>[^\]]*\d+/\d+)\] (?P<what>.*)$")


class BuildReader:
    """BuildKit's plain progress -> events: a new step is a stage, the rest are lines."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.seen: set[str] = set()

    def __call__(self, line: str) -> None:
        match = _STEP.match(line)
        if match and match["where"] not in self.seen:
            self.seen.add(match["where"])
            self.progress(Event("stage", f"{match['where']} {step_name(match['what'])}"))
        elif line.startswith("#") and " exporting to image" in line:
            self.progress(Event("stage", "writing the image"))
        else:
            self.progress(Event("line", line))


def step_name(text: str) -> str:
    """A step in a few words: what our scripts do, not their command lines."""
    if "install.sh" in text:
        words = json.loads(text[text.index('["') :]) if text.endswith("]") else []
        action = words[2] if len(words) > 2 else ""
        if action == "part":
            return f"installing {words[4].rpartition('/')[2]}"
        named = {"env": "making the environment", "compile": "compiling", "compiled": "taking over what was compiled"}
        return named.get(action, action)
    if "system.sh" in text:
        return "installing system packages"
    if "folders.sh" in text:
        return "making folders"
    return text[:80]
