#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0-only
"""How often `slingtorch explain` names the true cause, on public reports with a known one (docs/explain.md).

    benchmarks/explain.py --half measure --json explain.json
    benchmarks/explain.py --half write --list       # each case of the half that rules may be written from

A case is a file of benchmarks/explain_cases: source, system (slingshot, rocm, other), cause, remedy (a regular
expression that a right answer matches in its cause or remedy; empty for a sound log), a line of three dashes, the log.
Whoever collects cases does not look at the rules; whoever writes rules looks at the half `write` alone.

right        the first finding matches
partly       a later one matches
nothing      there is no finding that names a cause, or only "perhaps" with another one
wrong        the first finding is called a cause, and none matches
false alarm  a sound log with a finding that is called a cause

The last row leaves out the cases from threads that a rule names as its source: whoever wrote that rule had read them.
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
RULES = HERE.parent / 'slingtorch/explain_rules.cfg'
SEED = '27'     # the number of the issue; never changed, so a case stays in its half
VERDICTS = ('right', 'partly', 'nothing', 'wrong', 'sound', 'false alarm')
SYSTEMS = ('slingshot', 'rocm', 'other')


class CaseError(Exception):
    """A file that is not a case; the text names it and what it lacks."""


def half_of(name):
    """'write' or 'measure', from the name of a case and the seed alone: other cases do not move it."""
    return ('write', 'measure')[hashlib.sha256(f'{SEED}/{name}'.encode()).digest()[0] % 2]


def read_case(path):
    """{'name', 'half', 'source', 'system', 'cause', 'remedy', 'log'} of a file."""
    head, dashes, log = path.read_text(encoding='utf-8').partition('\n---\n')
    parser = configparser.ConfigParser(interpolation=None, delimiters=':')
    try:
        parser.read_string('[case]\n' + head)
        case = dict(parser['case'])
        re.compile(case['remedy'])
    except (configparser.Error, KeyError, re.error) as err:
        raise CaseError(f'{path}: {err!r}') from err
    if not dashes or not log.strip() or set(case) != {'source', 'system', 'cause', 'remedy'}:
        raise CaseError(f'{path}: a case has source, system, cause, remedy, a line with three dashes, and a log')
    if case['system'] not in SYSTEMS or (case['cause'] == 'sound') != (case['remedy'] == ''):
        raise CaseError(f'{path}: system is one of {", ".join(SYSTEMS)}; a sound log, and no other, has no remedy')
    return {'name': path.stem, 'half': half_of(path.stem), 'log': log, **case}


def is_named(source, rules):
    """Whether the text of the rules has one of the addresses of a case's source."""
    addresses = re.findall(r'https?://([^\s)]*[^\s).,;])', source)
    return any(re.search(re.escape(address) + r'(?![\w/])', rules, re.I) for address in addresses)


def explained(log):
    """The findings of `slingtorch explain --json`, in its order."""
    done = subprocess.run(
        [sys.executable, '-m', 'slingtorch', 'explain', '--json', '-'],
        cwd=HERE.parent, input=log, stdout=subprocess.PIPE, text=True, check=False,
    )
    if done.returncode not in (0, 3):
        raise SystemExit(f'slingtorch explain ended with status {done.returncode}')
    return json.loads(done.stdout)['findings']


def judged(case, findings):
    """One of VERDICTS."""
    named = [finding for finding in findings if finding['level'] in ('cause', 'perhaps')]
    causes = [finding for finding in named if finding['level'] == 'cause']
    if case['cause'] == 'sound':
        return 'false alarm' if causes else 'sound'
    hits = [bool(re.search(case['remedy'], finding['cause'] + '\n' + finding['remedy'], re.I)) for finding in named]
    if any(hits):
        return 'right' if hits[0] else 'partly'
    return 'wrong' if named and named[0]['level'] == 'cause' else 'nothing'


def main():
    """Judge the cases, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--cases', type=pathlib.Path, default=HERE / 'explain_cases', metavar='DIRECTORY')
    parser.add_argument('--half', choices=('write', 'measure', 'all'), default='measure')
    parser.add_argument('--list', action='store_true', help='each case with its verdict and the first answer')
    parser.add_argument('--json', metavar='FILE')
    args = parser.parse_args()

    try:
        cases = [read_case(path) for path in sorted(args.cases.glob('*.txt'))]
    except CaseError as err:
        sys.exit(f'benchmarks/explain.py: {err}')
    if args.list and args.half != 'write':
        parser.error("--list is for --half write: whoever has read the other half's answers cannot measure with it")
    cases = [case for case in cases if args.half in ('all', case['half'])]
    counts = {system: collections.Counter() for system in SYSTEMS}
    unnamed, rules = collections.Counter(), RULES.read_text(encoding='utf-8')
    for case in cases:
        findings = explained(case['log'])
        case['verdict'] = judged(case, findings)
        counts[case['system']][case['verdict']] += 1
        unnamed[case['verdict']] += not is_named(case['source'], rules)
        if args.list:
            first = f"{findings[0]['level']}: {findings[0]['cause']}" if findings else '-'
            print(f"{case['verdict']:<12}{case['name']}\n    true: {case['cause']}\n    said: {first}")

    print(f"{'half ' + args.half:<16}" + ''.join(f'{verdict:>13}' for verdict in VERDICTS) + f"{'right of faults':>19}")
    rows = [*counts.items(), ('slingshot, rocm', counts['slingshot'] + counts['rocm']),
            ('all', sum(counts.values(), collections.Counter())), ('no rule names', unnamed)]
    for name, count in rows:
        faults = sum(count[verdict] for verdict in VERDICTS[:4])
        share = f"{count['right']} of {faults}, {100 * count['right'] / faults:.0f} %" if faults else '-'
        print(f'{name:<16}' + ''.join(f'{count[verdict]:>13}' for verdict in VERDICTS) + f'{share:>19}')
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(
            {'half': args.half, 'seed': SEED, 'counts': {name: dict(count) for name, count in rows}}, indent=2) + '\n',
            encoding='utf-8')


if __name__ == '__main__':
    main()
