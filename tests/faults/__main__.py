# SPDX-License-Identifier: GPL-2.0-only
"""
Plant faults on emulated nodes, and print what a training and --check made of them, a line for each:

    python -m faults [--check-only] [NAME ...]

--check-only leaves the trainings out. The status is 1 if --check did not say what it must, or must say what does not
fit what the training did.
"""

import argparse
import sys

from testbed import modulestools, quickstarted

from . import FAULTS, HARM_OF_ANOTHER_KIND, run_all, verdict

FITS = {'breaks': ('red',), 'slow': ('named', 'yellow'), 'harmless': ('nothing', 'yellow')}
"""What --check must say where a training does so."""


def main(names):
    parser = argparse.ArgumentParser(prog='python -m faults')
    parser.add_argument('--check-only', action='store_true', help="no trainings")
    parser.add_argument('names', nargs='*', metavar='NAME', help="of faults; all without")
    args = parser.parse_args(names)
    wanted = [FAULTS[name] for name in args.names] or list(FAULTS.values())
    installed = quickstarted.installed(modulestools.lmod())
    wrong = []

    def show(name, result):
        if isinstance(result, BaseException):
            wrong.append(name)
            print(f'{name}: {result!r}', flush=True)
            return
        answer, training = result
        right, line = verdict(FAULTS[name], answer.colour, answer.lines)
        fits = not training or name in HARM_OF_ANOTHER_KIND or FAULTS[name].colour in FITS[training['outcome']]
        if not right or not fits or answer.left:
            wrong.append(name)
        outcome = f", training {training['outcome']} after {training['seconds']} s ({training['said']})" if training else ''
        print(f"{'' if name not in wrong else 'WRONG '}{name}: must be {FAULTS[name].colour}, {answer.colour} after "
              f"{answer.seconds:.1f} s: {line[:240]}{outcome}", flush=True)

    run_all(wanted, installed, lambda job: (job.check(), None if args.check_only else job.train()), 4, show)
    print(f"{len(wanted) - len(wrong)} of {len(wanted)} as they must be")
    sys.exit(bool(wrong))


if __name__ == '__main__':
    main(sys.argv[1:])
