"""One rank of a job as the launcher starts it, `python -P -m partc.cli.job JOB`: it records signals before it imports anything else.

A training that saves then handles them; any other rank ends on them, as by default.
"""

import gc
import signal
import sys

from partc.runtime.training.stopping import StopSignals


def main() -> None:
    """Runs the rank to its end."""
    # The launching process handles Ctrl-C; a SIGINT to one rank alone is to end that rank.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    with StopSignals(traces=True) as early:
        try:
            from partc.cli.job.job import Job
            from partc.cli.job.rank import run_rank

            code = run_rank(Job.loads(sys.argv[1]), early)
        except Exception as error:  # where memory is short, Python fails to load modules with errors of many kinds
            from partc.cli.output.failures import described

            code, text = described(error)
            print(text, file=sys.stderr, flush=True)
    gc.freeze()  # else the interpreter looks through all objects for reference cycles as it ends
    sys.exit(code)


if __name__ == "__main__":
    main()
