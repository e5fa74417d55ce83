#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0-only
"""How often `slingtorch explain` names the true cause, on public reports with a known one (docs/explain.md).

    benchmarks/explain.py
    benchmarks/explain.py --cases DIR --list            # the cases of a directory, each with its verdict
    benchmarks/explain.py --program /path/to/checkout   # another version's answers, judged by this program

A case is a text file NAME.txt in UTF-8: a head of four lines, a line of three dashes, and the log.

    source: the address of the thread or file, and its date
    system: slingshot, rocm or other
    cause: the confirmed cause, in a sentence; 'sound' for the log of a job that worked
    remedy: a case-insensitive regular expression; empty for a sound log
    ---
    the log, unchanged and as complete as possible

`remedy` matches text that names the confirmed cause or the remedy that worked, and nothing vaguer: `no space|quota`,
not `disk`. It does not match words that are copied from the log, unless they name the cause.
Whoever collects cases does not look at the rules; whoever writes rules does not look at explain_cases.

An answer is judged by what a hurried reader sees: the first 40 words of its cause and first remedy.

right        the first answer (a cause, "perhaps", or a quoted unknown error) matches
partly       a later answer matches
nothing      there is no answer, or the first is "perhaps" or a quotation, and none matches
wrong        the first answer is a cause, and none matches
false alarm  a sound log gets a cause as an answer
perhaps      a sound log gets "perhaps" as an answer
"""
import argparse
import collections
import configparser
import hashlib
import json
import pathlib
import re
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
OWN = HERE / 'explain_cases'
WORDS = 40      # words of an answer that count
VERDICTS = ('right', 'partly', 'nothing', 'wrong', 'sound', 'perhaps', 'false alarm')
SYSTEMS = ('slingshot', 'rocm', 'other')


def read_case(path):
    """Read a file, or exit with what it lacks: {'name', 'source', 'system', 'cause', 'remedy', 'log'}."""
    head, dashes, log = path.read_text(encoding='utf-8').partition('\n---\n')
    parser = configparser.ConfigParser(interpolation=None, delimiters=':')
    try:
        parser.read_string('[case]\n' + head)
        case = dict(parser['case'])
        re.compile(case['remedy'])
    except (configparser.Error, KeyError, re.error) as err:
        sys.exit(f'{path}: {err!r}')
    if not dashes or not log.strip() or set(case) != {'source', 'system', 'cause', 'remedy'}:
        sys.exit(f'{path}: a case has source, system, cause, remedy, a line with three dashes, and a log')
    if case['system'] not in SYSTEMS or (case['cause'] == 'sound') != (case['remedy'] == ''):
        sys.exit(f'{path}: system is one of {", ".join(SYSTEMS)}; a sound log, and no other, has no remedy')
    return {'name': path.stem, 'log': log, **case}


def explained(log, program):
    """The findings of `slingtorch explain --json`, in their order."""
    done = subprocess.run([sys.executable, '-m', 'slingtorch', 'explain', '--json', '-'], cwd=program, input=log,
                          stdout=subprocess.PIPE, encoding='utf-8', check=False)
    if done.returncode not in (0, 3):
        raise SystemExit(f'slingtorch explain ended with status {done.returncode}')
    return json.loads(done.stdout)['findings']


def judged(case, findings):
    """The verdict on a case, one of VERDICTS."""
    named = [finding for finding in findings if finding['level'] in ('cause', 'perhaps', 'unknown')]
    levels = {finding['level'] for finding in named}
    if case['cause'] == 'sound':
        return 'false alarm' if 'cause' in levels else 'perhaps' if 'perhaps' in levels else 'sound'
    texts = [' '.join((finding['cause'] + ' ' + finding['remedy']).split()[:WORDS]) for finding in named]
    hits = [bool(re.search(case['remedy'], text, re.I)) for text in texts]
    if any(hits):
        return 'right' if hits[0] else 'partly'
    return 'wrong' if named and named[0]['level'] == 'cause' else 'nothing'


def main():
    """Judge the cases and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--cases', type=pathlib.Path, default=OWN, metavar='DIRECTORY')
    parser.add_argument('--program', type=pathlib.Path, default=HERE.parent, metavar='CHECKOUT')
    parser.add_argument('--list', action='store_true', help='each case with its verdict and the first answer')
    args = parser.parse_args()

    paths = sorted(args.cases.glob('*.txt'))
    cases = [read_case(path) for path in paths]
    if args.list and args.cases.resolve() == OWN:
        parser.error("--list is for other --cases: whoever has read these answers cannot measure with them")
    counts = {'slingshot, rocm': collections.Counter(), 'other': collections.Counter()}
    for case in cases:
        findings = explained(case['log'], args.program)
        case['verdict'] = judged(case, findings)
        counts['other' if case['system'] == 'other' else 'slingshot, rocm'][case['verdict']] += 1
        if args.list:
            first = f"{findings[0]['level']}: {findings[0]['cause']}" if findings else '-'
            print(f"{case['verdict']:<12}{case['name']}\n    true: {case['cause']}\n    said: {first}")

    total = hashlib.sha256(b''.join(path.name.encode() + path.read_bytes() for path in paths)).hexdigest()
    print(f'{len(paths)} cases in {args.cases}, sha256 {total}')
    print(f"{'':<16}" + ''.join(f'{verdict:>13}' for verdict in VERDICTS) + f"{'right of faults':>19}")
    counts['all'] = sum(counts.values(), collections.Counter())
    for name, count in counts.items():
        faults = sum(count[verdict] for verdict in VERDICTS[:4])
        share = f"{count['right']} of {faults}, {100 * count['right'] / faults:.0f} %" if faults else '-'
        print(f'{name:<16}' + ''.join(f'{count[verdict]:>13}' for verdict in VERDICTS) + f'{share:>19}')


if __name__ == '__main__':
    main()
