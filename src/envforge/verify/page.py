"""The receipt as a page for people: one HTML file that needs nothing beside it, or a PNG where Pillow is installed."""

from __future__ import annotations

import html
import importlib
import importlib.util
import math
import os
import tempfile
from pathlib import Path
from typing import Any

from envforge.verify.report import render, verdict_line

COLOURS = {"pass": "#1a7f37", "fail": "#cf222e", "warn": "#9a6700", "skip": "#6e7781"}
_STYLE = """
body{font:15px/1.45 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem;color:#1f2328}
h1{font-size:1.3rem}h2{font-size:1.05rem;margin:1.6rem 0 .4rem}table{border-collapse:collapse;width:100%}
td,th{text-align:left;vertical-align:top;padding:.2rem .6rem .2rem 0;border-bottom:1px solid #d8dee4}
.s{font-weight:600;white-space:nowrap}.f{color:#57606a;font-size:.85rem;overflow-wrap:anywhere}
blockquote{margin:.3rem 0;padding:.3rem .8rem;border-left:3px solid #d8dee4;white-space:pre-wrap}
pre{overflow:auto;background:#f6f8fa;padding:.6rem;font-size:.8rem}
"""


def check_page(path: Path) -> None:
    """Before the work is done: can this page be written?

    Raises:
        ValueError: another suffix, or a PNG without Pillow; what to do instead.
    """
    kind = path.suffix.lower()
    if kind not in (".html", ".htm", ".png"):
        raise ValueError(f"{path}: a report is a .html or a .png file")
    if kind == ".png" and importlib.util.find_spec("PIL") is None:
        raise ValueError("a PNG report needs Pillow, which is not installed here; write a .html report instead")


def write_page(path: Path, receipt: dict[str, Any]) -> None:
    """Write FILE.html or FILE.png, whole or not at all.

    Raises:
        ValueError: as `check_page` says.
    """
    check_page(path)
    data = picture(receipt) if path.suffix.lower() == ".png" else page(receipt).encode("utf-8")
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=str(path.parent), prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        umask = os.umask(0)
        os.umask(umask)
        Path(name).chmod(0o666 & ~umask)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink()
        raise


def page(receipt: dict[str, Any]) -> str:
    """The whole page; everything that came from outside is escaped."""
    state = "pass" if receipt["passed"] else "fail"
    parts = [
        f"<h1 style='color:{COLOURS[state]}'>{text(verdict_line(receipt))}</h1>",
        table([(name, value) for name, value in facts(receipt) if value]),
    ]
    if receipt.get("findings"):
        parts.append("<h2>Findings</h2>" + "".join(finding(row) for row in receipt["findings"]))
    chat = receipt["chat"]
    if chat["base"] is not None:
        rows = [
            ("prompt", chat["prompt"]),
            ("base", chat["base"]),
            ("4-bit", chat["four_bit"]),
            ("merged", chat["merged"]),
        ]
        quoted = "".join(
            f"<p>{name}</p><blockquote>{text(said)}</blockquote>" for name, said in rows if said is not None
        )
        parts.append(f"<h2>Chat</h2>{quoted}")
    if receipt["losses"]:
        parts.append(f"<h2>Loss</h2>{plot(receipt['losses'])}")
    parts += [layer_part(layer) for layer in receipt["layers"]]
    title = f"proof {'passed' if receipt['passed'] else 'failed'}: {receipt['stack']}"
    head = f"<meta charset='utf-8'><title>{text(title)}</title><style>{_STYLE}</style>"
    return f"<!doctype html><html lang='en'><head>{head}</head><body>\n" + "\n".join(parts) + "\n</body></html>\n"


def facts(receipt: dict[str, Any]) -> list[tuple[str, Any]]:
    """The head of the page."""
    host, versions, model = receipt.get("host") or {}, receipt.get("versions") or {}, receipt.get("model") or {}
    return [
        ("started", receipt.get("started")),
        ("seconds", receipt.get("seconds")),
        ("model", model.get("id")),
        ("stack", f"{receipt.get('stack')} on {receipt.get('device')}, grade {receipt.get('grade')}"),
        ("versions", ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))),
        ("host", ", ".join(str(host[key]) for key in ("os", "kernel", "arch") if host.get(key))),
        ("GPUs", "; ".join(host.get("gpus") or [])),
        ("driver", host.get("driver")),
        ("image", receipt.get("image_digest")),
        ("plan", receipt.get("plan_hash")),
        ("lock", receipt.get("lock_hash")),
    ]


def layer_part(layer: dict[str, Any]) -> str:
    """One layer as a table of its checks."""
    rows = []
    for check in layer["checks"]:
        figures = ", ".join(
            f"{key} {short(value)}" for key, value in check["figures"].items() if value not in (None, [], {})
        )
        error = (
            f"<details><summary>error</summary><pre>{text(check['error'])}</pre></details>" if check["error"] else ""
        )
        rows.append(
            f"<tr><td class='s' style='color:{COLOURS.get(check['status'], '#000')}'>{text(check['status'])}</td>"
            f"<td class='s'>{text(check['id'].partition('.')[2])}</td>"
            f"<td>{text(check['text'])}<div class='f'>{text(figures)}</div>{error}</td></tr>"
        )
    return f"<h2>{text(layer['layer'])} ({layer['seconds']:.1f} s)</h2><table>{''.join(rows)}</table>"


def finding(row: dict[str, Any]) -> str:
    """One finding."""
    fixes = "".join(f"<li>{text(fix)}</li>" for fix in row.get("fixes", ()))
    retry = "a retry may help" if row.get("retryable") else "a retry does not help"
    return (
        f"<p><b>{text(row['title'])}</b> <span class='f'>{text(row['id'])}, {text(row['confidence'])}; owner: "
        f"{text(row['owner'])}; {retry}</span><br>{text(row['cause'])}</p>" + (f"<ul>{fixes}</ul>" if fixes else "")
    )


def table(rows: list[tuple[str, Any]]) -> str:
    """Two columns."""
    body = "".join(f"<tr><td class='s'>{text(name)}</td><td>{text(value)}</td></tr>" for name, value in rows)
    return f"<table>{body}</table>"


def text(value: Any) -> str:
    """Escaped."""
    return html.escape(str(value))


def short(value: Any) -> str:
    """A figure on the page."""
    shown = f"{value:.4g}" if isinstance(value, float) else str(value)
    return shown if len(shown) <= 160 else shown[:157] + "..."


def points(losses: list[Any], width: float, height: float) -> tuple[list[tuple[float, float]], float, float]:
    """Places of the finite losses in a box (x to the right, y down), and the lowest and the highest of them."""
    kept = [(n, float(v)) for n, v in enumerate(losses) if isinstance(v, (int, float)) and math.isfinite(v)]
    if not kept:
        return [], 0.0, 0.0
    low, high = min(v for _, v in kept), max(v for _, v in kept)
    across, down = width / max(1, len(losses) - 1), height / ((high - low) or 1.0)
    return [(n * across, height - (v - low) * down) for n, v in kept], low, high


def plot(losses: list[Any]) -> str:
    """The losses as an inline SVG."""
    width, height, left, top = 560.0, 150.0, 60.0, 12.0
    places, low, high = points(losses, width, height)
    moved = [(x + left, y + top) for x, y in places]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in moved)
    dots = "".join(f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3'/>" for x, y in moved)
    axis = f"<path d='M{left} {top}V{top + height}H{left + width}' fill='none' stroke='#8c959f'/>"
    label = f"<text x='{left - 8}' text-anchor='end' y="
    labels = f"{label}'{top + 5}'>{high:.3f}</text>{label}'{top + height}'>{low:.3f}</text>"
    lost = len(losses) - len(places)
    note = f"<p>{lost} losses are not finite</p>" if lost else ""
    size = f"viewBox='0 0 {left + width + 12} {top + height + 24}' role='img' aria-label='loss over the steps'"
    steps = f"<text x='{left + width}' y='{top + height + 18}' text-anchor='end'>step {len(losses)}</text>"
    curve = f"<polyline points='{line}' fill='none' stroke='#0969da' stroke-width='2'/><g fill='#0969da'>{dots}</g>"
    return f"<svg {size} style='max-width:40rem' font-size='12' fill='#57606a'>{axis}{labels}{steps}{curve}</svg>{note}"


def picture(receipt: dict[str, Any]) -> bytes:
    """The report and the loss curve as a PNG."""
    import io

    Image, ImageDraw, ImageFont = (
        importlib.import_module(f"PIL.{name}") for name in ("Image", "ImageDraw", "ImageFont")
    )

    lines = [line[:150] for line in render(receipt).splitlines() if not line.startswith("loss ")]
    try:
        font = ImageFont.load_default(14)
    except TypeError:  # Pillow before 10.1 has one size
        font = ImageFont.load_default()
    row, chart = 19, 170 if receipt["losses"] else 0
    image = Image.new("RGB", (1240, row * len(lines) + chart + 40), "white")
    draw = ImageDraw.Draw(image)
    for number, line in enumerate(lines):
        state = {"ok": "pass", "FAIL": "fail", "warn": "warn", "skip": "skip"}.get(line.strip().partition(" ")[0], "")
        # The default font holds Latin letters only.
        shown = line.encode("latin-1", "replace").decode("latin-1")
        # Letters differ in width: the columns of the text report get places of their own.
        parts = ((30, shown[2:6]), (80, shown[7:27]), (270, shown[28:])) if state else ((20, shown),)
        for across, part in parts:
            draw.text((across, 15 + row * number), part, fill=COLOURS.get(state, "#1f2328"), font=font)
    if chart:
        top = 25 + row * len(lines)
        places, low, high = points(receipt["losses"], 600, chart - 40)
        moved = [(90 + x, top + y) for x, y in places]
        draw.line([(90, top), (90, top + chart - 40), (690, top + chart - 40)], fill="#8c959f")
        if len(moved) > 1:
            draw.line(moved, fill="#0969da", width=2)
        draw.text((20, top - 8), f"{high:.3f}", fill="#57606a", font=font)
        draw.text((20, top + chart - 50), f"{low:.3f}", fill="#57606a", font=font)
        draw.text((700, top + chart - 50), f"loss, {len(receipt['losses'])} steps", fill="#57606a", font=font)
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()
