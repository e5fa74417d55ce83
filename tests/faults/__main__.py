# SPDX-License-Identifier: GPL-2.0-only
"""Plant faults on emulated nodes, and write what a training and --check made of them: python -m faults [NAME ...]"""

import datetime
import json
import re
import sys

from testbed import ROOT, easybuild, modulestools

from . import FAULTS, run_all, verdict

RECORD = ROOT / 'tests/records/faults/seen.json'
PAGE = ROOT / 'docs/faults.md'


def look(job):
    """What is recorded of a fault."""
    answer = job.check()
    return job.train(), answer


def main(names):
    wanted = [FAULTS[name] for name in names] or list(FAULTS.values())
    installed = easybuild.installed('PyTorch-2.13.0-local-cpu.eb', modulestools.lmod(),
                                    '--try-amend=environment_image=True')
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {'faults': {}}
    date = datetime.date.today().isoformat()
    torch = installed.env['EBVERSIONPYTORCH']
    for name, result in run_all(wanted, installed, look).items():
        if isinstance(result, BaseException):
            print(f'{name}: {result!r}')
            continue
        training, answer = result
        right, said = verdict(FAULTS[name], answer)
        record['faults'][name] = {
            'date': date, 'torch': torch, 'training': training['outcome'], 'training took': training['seconds'],
            'training said': training['said'], 'check': said, 'check took': round(answer.seconds, 1),
            'right': right, 'left': answer.left}
        print(json.dumps({name: record['faults'][name]}), flush=True)
    record['faults'] = {name: record['faults'][name] for name in FAULTS if name in record['faults']}
    RECORD.parent.mkdir(exist_ok=True)
    RECORD.write_text(json.dumps(record, indent=1) + '\n')


if __name__ == '__main__':
    main(sys.argv[1:])
