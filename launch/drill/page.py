"""The report of a drill as one HTML file that needs nothing else: words first, then a picture, then a table. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from mindio_tft_patch.launch.drill.findings import GOOD, Report, Verdict
from mindio_tft_patch.launch.drill.picture import timeline
from mindio_tft_patch.launch.drill.view import COLUMNS, cells, phases

_LOOKS = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1000px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; margin-bottom: 0.2em; } h2 { font-size: 1.15em; margin-top: 2em; }
.verdict { padding: 0.7em 1em; border-radius: 6px; font-weight: 600; }
.good { background: #e3f3e1; color: #1c5e20; } .bad { background: #fbe3e1; color: #8c1d18; }
.numbers { display: flex; flex-wrap: wrap; gap: 2.5em; margin: 1.2em 0; }
.numbers b { display: block; font-size: 1.8em; line-height: 1.2; } .numbers span { color: #555; }
table { border-collapse: collapse; font-size: 13px; }
th, td { text-align: left; padding: 4px 9px; vertical-align: top; }
th { border-bottom: 2px solid #ccc; } td { border-bottom: 1px solid #e5e5e5; } code, pre { font-size: 12px; }
pre { background: #f5f5f5; padding: 0.8em; overflow-x: auto; white-space: pre-wrap; } svg { width: 100%; height: auto; }
"""


def page(report: Report) -> str:
    """The whole file."""
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>Fault drill</title>',
            f"<style>{_LOOKS}</style></head><body>",
            *_for_everybody(report),
            "<h2>What happened when</h2>",
            timeline(report),
            *_for_engineers(report),
            "</body></html>\n",
        ]
    )


def _for_everybody(report: Report) -> Iterator[str]:
    problems = report.problems()
    yield "<h1>Fault drill</h1>"
    if problems:
        yield '<p class="verdict bad">Not everything went as documented.</p>'
    else:
        yield '<p class="verdict good">Every fault was dealt with as documented.</p>'
    yield f"<p>{escape(' '.join(report.summary()))}</p>"
    for sentence in report.more:
        yield f"<p>{escape(sentence)}</p>"
    if problems:
        yield f"<ul>{''.join(f'<li>{escape(problem)}</li>' for problem in problems)}</ul>"
    happened = [outcome for outcome in report.outcomes if outcome.fired is not None]
    good = sum(outcome.verdict in GOOD for outcome in happened)
    figures = [
        (str(len(happened)), "faults happened"),
        (f"{good} of {len(happened)}", "dealt with as documented"),
        (str(report.count(Verdict.IN_PLACE)), "repaired without ending the job"),
        (str(report.lost_steps), "completed steps computed again"),
        (f"{sum(report.recovery_seconds):.1f} s", "spent on recoveries in all"),
    ]
    told = "".join(f"<div><b>{escape(number)}</b><span>{escape(what)}</span></div>" for number, what in figures)
    yield f'<div class="numbers">{told}</div>'


def _for_engineers(report: Report) -> Iterator[str]:
    yield "<h2>Every fault</h2><table><tr>"
    yield "".join(f"<th>{name}</th>" for name in (*COLUMNS, "phases, in seconds", "reason"))
    yield "</tr>"
    for outcome in report.outcomes:
        reason = "" if outcome.recovery is None else outcome.recovery.reason
        told = (*cells(report, outcome), phases(outcome.recovery), reason)
        yield f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in told)}</tr>"
    yield "</table>"
    yield "<h2>How to repeat it</h2>"
    yield f"<pre>{escape(chr(10).join(report.again))}</pre>"
    yield (
        "<p>The training begins from what its <code>--load</code> holds. Where that is also the folder of its "
        "<code>--save</code>, this run has left checkpoints in it: take them away first, or give another folder.</p>"
    )
    codes = ", ".join(str(run.code) for run in report.runs)
    yield f"<p>Exit code of the command: {escape(codes)}. Output and logs: <code>{escape(report.folder)}</code></p>"
