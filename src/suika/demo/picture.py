"""The report's pictures as plain SVG: no script, no font, nothing fetched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from suika.demo.timeline import Timeline

COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2")
WIDTH, ROW, LEFT, TOP = 1100, 26, 60, 64


def colours(names: Sequence[str]) -> dict[str, str]:
    return {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}


def timeline_svg(timeline: Timeline, devices: Sequence[str], colour: Mapping[str, str]) -> str:
    """One row per device, one block per generation; the script's events as numbered lines."""
    scale = (WIDTH - LEFT - 10) / max(timeline.stop_s, 1e-9)
    height = TOP + ROW * len(devices) + 30
    row = {device: TOP + ROW * i for i, device in enumerate(devices)}
    parts = [f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="who held which device when">']
    for device, y in row.items():
        parts.append(f'<text x="{LEFT - 6}" y="{y + 17}" text-anchor="end">{escape(device)}</text>')
        parts.append(f'<rect class="idle" x="{LEFT}" y="{y}" width="{WIDTH - LEFT - 10}" height="{ROW - 2}"/>')
    for span in timeline.spans:
        x, width = LEFT + span.start_s * scale, max((span.stop_s - span.start_s) * scale, 0.5)
        label = f"{span.job} {span.layout}"
        title = f"{label}, generation {span.generation}, {span.start_s:.1f} to {span.stop_s:.1f} s on {span.device}"
        parts.append(
            f'<g><title>{escape(title)}</title><rect x="{x:.1f}" y="{row[span.device]}" width="{width:.1f}" '
            f'height="{ROW - 2}" fill="{colour[span.job]}" stroke="white" stroke-width="0.7"/>'
        )
        if width > 6.2 * len(label):
            parts.append(f'<text class="in" x="{x + 4:.1f}" y="{row[span.device] + 16}">{escape(label)}</text>')
        parts.append("</g>")
    last_x = -99.0
    for number, mark in enumerate(timeline.marks, 1):
        x = LEFT + mark.at_s * scale
        y = 14 if x - last_x > 18 else 30
        last_x = x
        parts.append(
            f"<g><title>{escape(mark.text)}</title>"
            f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{y + 4}" y2="{height - 26}"/>'
            f'<text x="{x:.1f}" y="{y}" text-anchor="middle">{number}</text></g>'
        )
    parts.append(_seconds_axis(timeline.stop_s, scale, height - 10))
    return "".join(parts) + "</svg>"


def _seconds_axis(stop_s: float, scale: float, y: float) -> str:
    step = next(step for step in (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 3600) if stop_s / step <= 15 or step == 3600)
    ticks = [step * i for i in range(int(stop_s // step) + 1)]
    return "".join(f'<text x="{LEFT + t * scale:.1f}" y="{y}" text-anchor="middle">{t} s</text>' for t in ticks)


def losses_svg(
    losses: Mapping[str, Sequence[float]], moves: Mapping[str, Sequence[int]], colour: Mapping[str, str]
) -> str:
    """Loss by step of each job; a dot at each step after which the job was moved."""
    height, floor = 260, 230
    steps = max((len(values) for values in losses.values()), default=1)
    top = max((max(values) for values in losses.values() if values), default=1.0)
    low = min((min(values) for values in losses.values() if values), default=0.0)
    across, up = (WIDTH - LEFT - 10) / max(steps, 1), (floor - 20) / max(top - low, 1e-9)

    def at(step: int, value: float) -> tuple[float, float]:
        return LEFT + step * across, floor - (value - low) * up

    parts = [f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="loss by step">']
    for name, values in losses.items():
        points = " ".join("{:.1f},{:.1f}".format(*at(i + 1, value)) for i, value in enumerate(values))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour[name]}" stroke-width="1.6"/>')
        for step in moves.get(name, ()):
            if 0 < step <= len(values):
                x, y = at(step, values[step - 1])
                parts.append(
                    f"<g><title>{escape(name)} moved after step {step}</title>"
                    f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour[name]}" stroke="white"/></g>'
                )
    for value in (top, (top + low) / 2, low):
        parts.append(f'<text x="{LEFT - 6}" y="{at(0, value)[1] + 4:.1f}" text-anchor="end">{value:.2f}</text>')
    parts.append(f'<text x="{LEFT}" y="{height - 6}">step 0</text>')
    parts.append(f'<text x="{WIDTH - 10}" y="{height - 6}" text-anchor="end">step {steps}</text>')
    return "".join(parts) + "</svg>"
