# SPDX-License-Identifier: GPL-2.0-only
"""
Plant faults on emulated nodes, and write what a training and --check made of them:

    python -m faults [--check-only] [NAME ...]

--check-only leaves the trainings out, which what --check says does not change, and keeps what is recorded of them.
"""

import argparse
import datetime
import json
import os
import re
import statistics
import sys
import textwrap
import threading

from testbed import DIR, ROOT, easybuild, modulestools

from . import FAULTS, ONLY_BY_THE_PROGRAM, TRAINING_LIMIT, run_all, verdict

RECORD = ROOT / 'tests/records/faults/seen.json'
PAGE = ROOT / 'docs/faults.md'


MUST = {'red': 'red', 'yellow': 'yellow', 'named': 'red or yellow', 'nothing': 'nothing red'}
HEAD = '''# Faults that were planted

`cd tests && python -m faults` writes this page (as root). It plants each of these faults on two emulated nodes with a
network, mounts, host name, `/tmp`, `/dev/shm`, hosts file and boot id of their own, starts `--check` there, and then a
training of four ranks with PyTorch {torch} over gloo. A training breaks if it ends with an error, if no rank says that
it trained, or if it made no step in {limit} s; it is slow if it made some of its 8 steps by then. The faults, and the
training, are in `tests/faults`, the record in `tests/records/faults/seen.json`: trainings of {dates}, `--check` of
{checked}, with `SLINGTORCH_CHECK_SECONDS=40`. `python -m faults --check-only` keeps what is recorded of the trainings.
In CI `tests/faults/test_faults.py` plants {tested} of them, and compares what `--check` says.

{sums}

{silent}

| fault | training | `--check` must say | `--check` said |
|---|---|---|---|
'''


def page(record):
    """The text of docs/faults.md."""
    red = {name for name, found in record.items() if found['check'] != 'goes on'}
    broken = {name for name, found in record.items() if found['training'] == 'breaks'}
    said = {name: verdict(FAULTS[name], found['check'], found['check said']) for name, found in record.items()}
    right = {name for name in record if said[name][0]}
    left = [name for name in record if record[name]['left']]
    sums = (f"Of {len(record)} faults and sound set-ups {len(broken)} break the training. `--check` stopped "
            f"{len(broken & red)} of these, and named the cause of {len(broken & red & right)}: "
            f"{len(broken & red & right) / max(1, len(broken)):.1%}. It goes on with "
            f"{listed(name for name in record if name in broken - red)}. "
            f"Of the other {len(record) - len(broken)} it stopped {len(red - broken)}"
            f"{': ' * bool(red - broken)}{listed(name for name in record if name in red - broken)}, and said what it "
            f"must of {len(right - broken)}. It hung in {sum(found['check'] == 'hangs' for found in record.values())}, "
            f"and left files in `/tmp` in {len(left)}. The longest took "
            f"{max(found['check took'] for found in record.values()):.0f} s; the load of this machine with two cores "
            f"was {statistics.median(found.get('check load', 0) for found in record.values()):.0f} in the middle.")
    wrong = listed(name for name in record if name not in right)
    text = HEAD.format(
        torch=' and '.join(sorted({found['torch'] for found in record.values()})), limit=TRAINING_LIMIT,
        dates=' and '.join(sorted({found['date'] for found in record.values()})),
        checked=' and '.join(sorted({found['check date'] for found in record.values()})),
        tested=len(record) - len(ONLY_BY_THE_PROGRAM), sums=textwrap.fill(sums, 120),
        silent=textwrap.fill(f"It did not say what it must of {len(record) - len(right)}: {wrong}." if wrong else
                             "It said what it must of all.", 120))
    for name, found in record.items():
        colour = found['check'] if name in red or not said[name][1] else 'yellow'
        cells = (f"**{plain(name)}**: {plain(FAULTS[name].text)}", found['training'], MUST[FAULTS[name].colour],
                 f"{'' if name in right else '**not yet.** '}{colour} {plain(said[name][1][:240])}".strip())
        text += f"| {' | '.join(cells)} |\n"
    return text


def listed(names):
    """Names of faults, for Markdown."""
    return ', '.join(map(plain, names))


def plain(text):
    """Text that Markdown leaves as it is."""
    return re.sub(r'([|<>_*`\[\]])', r'\\\1', text.strip())


def anywhere(found):
    """What was found, as JSON would have it, with names instead of the directories of this machine."""
    text = json.dumps(found)
    for directory, name in (DIR, 'TESTBED'), (ROOT, 'SLINGTORCH'), (sys.base_prefix, 'PYTHON'):
        if str(directory) != '/usr':
            text = text.replace(f'{directory}/', f'{name}/')
    return json.loads(text)


def look(job):
    """What is recorded of a fault: (of the training, of --check)."""
    answer = job.check()
    return job.train(), answer


def look_at_check(job):
    """As look(), without a training."""
    return None, job.check()


def main(names):
    parser = argparse.ArgumentParser(prog='python -m faults')
    parser.add_argument('--check-only', action='store_true', help="no trainings: keep what is recorded of them")
    parser.add_argument('names', nargs='*', metavar='NAME', help="of faults; all without")
    args = parser.parse_args(names)
    wanted = [FAULTS[name] for name in args.names] or list(FAULTS.values())
    installed = easybuild.installed('PyTorch-2.13.0-local-cpu.eb', modulestools.lmod(),
                                    '--try-amend=environment_image=True')
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {'faults': {}}
    date = datetime.date.today().isoformat()
    torch, lock = installed.env['EBVERSIONPYTORCH'], threading.Lock()

    def show(name, result):
        if isinstance(result, BaseException):
            print(f'{name}: {result!r}', flush=True)
            return
        training, answer = result
        found = {key: value for key, value in record['faults'].get(name, {}).items() if not key.startswith('check')}
        if training:
            found = {'date': date, 'torch': torch, 'training': training['outcome'],
                     'training took': training['seconds'], 'training said': training['said']}
        found = {**found, 'check date': date, 'check': answer.colour, 'check took': round(answer.seconds, 1),
                 'check load': round(os.getloadavg()[0]),
                 'check said': [[level, line[:400]] for level, line in answer.lines
                                if level in ('red', 'yellow', 'stderr')][:40],
                 'left': len(answer.left)}
        found = anywhere(found)
        print(json.dumps({name: found}), flush=True)
        with lock:
            record['faults'][name] = found
            record['faults'] = {name: record['faults'][name] for name in FAULTS if name in record['faults']}
            RECORD.parent.mkdir(exist_ok=True)
            RECORD.write_text(json.dumps(record, indent=1) + '\n')

    run_all(wanted, installed, look_at_check if args.check_only else look, 4, show)
    PAGE.write_text(page(record['faults']))


if __name__ == '__main__':
    main(sys.argv[1:])
