# SPDX-License-Identifier: GPL-2.0-only
"""
slingtorch explain: what went wrong in a job, from its output or from the files of PyTorch's flight recorder.

What is known stands in messages.txt and faults.txt, as data (docs/explain.md).
"""
import gzip
import json
import os
import re
import sys
from typing import Any, Iterable, List, Optional, Tuple

from slingtorch import wrapped
from slingtorch.explain.answers import answers
from slingtorch.explain.log import Log
from slingtorch.explain.recorder import explain_dumps, find_dumps
from slingtorch.explain.tables import ExplainError, read_faults, read_rules

# statuses of the command; 1 is an error
EXPLAINED, NOTHING_KNOWN = 0, 3
# Slurm, PBS (job.o4711), torchrun (stdout.log), and what people name theirs
OUTPUT_NAME = re.compile(r'\.(?:out|err|log|txt|output|error)(?:\.gz)?$|\.[oe]\d+(?:\.\d+)?$|^slurm-\d')


def open_log(path: str) -> Tuple[str, Any]:
    """(name, binary stream) of a log, decompressed if necessary; '-' is standard input."""
    if path == '-':
        name, stream = 'standard input', sys.stdin.buffer    # type: Tuple[str, Any]
    else:
        name, stream = path, open(path, 'rb')
    return name, gzip.GzipFile(fileobj=stream) if stream.peek(2)[:2] == b'\x1f\x8b' else stream


def outputs(directory: str) -> List[str]:
    """The files of a directory whose names are those of job outputs, the newest last."""
    paths = [entry.path for entry in os.scandir(directory) if OUTPUT_NAME.search(entry.name) and entry.is_file()]
    return sorted(paths, key=lambda path: (os.stat(path).st_mtime, path))


def run(paths: Iterable[str], as_json: bool = False, network: Optional[str] = None) -> int:
    """slingtorch explain, of logs, '-' and directories of the flight recorder, on a site with this network."""
    faults = read_faults()
    log, dumps, logs = Log(read_rules(faults)), [], []
    for path in paths:
        if not os.path.isdir(path):
            logs.append(path)
            continue
        found, remarks = find_dumps(path)
        log.remarks += remarks
        inside = outputs(path)
        if not found and not inside:
            log.remarks.append("%s contains no files of PyTorch's flight recorder (...rank-0, ...rank-1) and no job "
                               "outputs (slurm-*, *.out, *.err, *.log, *.o4711)" % path)
        for prefix, by_rank in found.items():
            dumps.append((os.path.join(path, prefix), len(by_rank), explain_dumps(by_rank)))
        logs += inside
    for path in logs:
        try:
            log.read(*open_log(path))
        except OSError as err:
            raise ExplainError("%s cannot be read: %s. Name the output of a job (slurm-JOB.out), or '-'"
                               % (path, err.strerror))
    shown = answers(log, faults, [network.rstrip('0123456789')] if network else [])
    told = [said for _, _, said in dumps if said]
    if as_json:
        print(json.dumps({'version': 1, 'findings': [answer.data() for answer in shown], 'remarks': log.remarks,
                          'flight_recorder': [{'prefix': prefix, 'files': files, 'said': said}
                                              for prefix, files, said in dumps]}, indent=2))
        return EXPLAINED if shown or told else NOTHING_KNOWN
    for prefix, files, said in dumps:
        print("flight recorder, %d files %s*:" % (files, prefix))
        for text in said or ["every collective that started also finished, on all ranks with a file"]:
            print(wrapped(text, '   ', '      '))
        print()
    for number, answer in enumerate(shown, 1):
        answer.show(number)
    for remark in log.remarks:
        print('remark: %s' % remark)
    reasons = [answer for answer in shown if answer.level != 'note']
    if log.quoted and not reasons and not told:
        print("No known fault explains why the job ended. The last warnings and errors, which may or may not matter:")
        for name, line, text in log.quoted:
            print('   %s:%d: %s' % (name, line, text))
        print()
    if not shown and not told:
        print("Nothing known was found. Run the job again with export NCCL_DEBUG=INFO FI_LOG_LEVEL=warn, and with "
              "conda-python-distributed --check before the program. Then explain its whole output, with standard "
              "error, and the flight recorder's files.")
        return NOTHING_KNOWN
    return EXPLAINED
