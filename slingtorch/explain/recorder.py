# SPDX-License-Identifier: GPL-2.0-only
"""
The files of PyTorch's flight recorder: which rank did not come to which collective, and where in the program.

They are pickles. Only numbers, texts and containers are read from them, and only what has the form that PyTorch writes
is kept (torch/csrc/distributed/c10d/FlightRecorder).
"""
import functools
import io
import json
import operator
import os
import pickle
import re
from typing import Any, Dict, List, Optional, Tuple

from slingtorch.explain.tables import ExplainError
from slingtorch.job.findings import ranks_text

Entry = Dict[str, Any]
DUMP_NAME = re.compile(r'^(.*?)(\d+)$')
MAX_DUMP_BYTES = 1 << 28
MAX_TEXT = 500          # characters of a name, a size or a path that are kept


class PlainUnpickler(pickle._Unpickler):    # type: ignore[misc,name-defined]
    """
    Reads the numbers, texts and containers of a pickle, and refuses classes and functions.

    The pickle module has this in Python too: the one in C reserves as many places as a file of nine bytes asks for.
    BYTEARRAY8 does so in both, and the numbers in decimal (INT, LONG) take quadratic time before Python 3.10.7.
    """

    dispatch = {code: load for code, load in pickle._Unpickler.dispatch.items()     # type: ignore[attr-defined]
                if code not in b'\x96IL'}

    def find_class(self, module: str, name: str) -> Any:
        """Nothing has a class."""
        raise pickle.UnpicklingError("it names %s.%s, but the flight recorder never writes a class" % (module, name))


def text_of(value: Any) -> str:
    """A text, shortened; of anything else ''."""
    return value[:MAX_TEXT] if isinstance(value, str) else ''


def whole(value: Any) -> int:
    """A number of a collective; 0 for what is none."""
    return value if isinstance(value, int) and 0 <= value < 1 << 63 else 0


def sizes_of(value: Any, depth: int = 0) -> Any:
    """Lists of numbers, such as the sizes of tensors."""
    if isinstance(value, (list, tuple)) and depth < 4:
        return [sizes_of(part, depth + 1) for part in value[:8]]
    return whole(value)


def entry_of(raw: Dict[Any, Any]) -> Entry:
    """What is needed of a collective, in its form."""
    frames = raw.get('frames')
    group = raw.get('process_group')
    group = [text_of(part) for part in group[:2]] if isinstance(group, (list, tuple)) else []
    # before version 2.2 of the format it is seq_id
    number = raw['collective_seq_id'] if 'collective_seq_id' in raw else raw.get('seq_id')
    return {'number': whole(number), 'name': text_of(raw.get('profiling_name')), 'state': text_of(raw.get('state')),
            'retired': bool(raw.get('retired')), 'p2p': bool(raw.get('is_p2p')),
            'group': (group[-1] or group[0]) if group else '', 'sizes': sizes_of(raw.get('input_sizes')),
            'frames': [(text_of(frame.get('filename')), whole(frame.get('line')))
                       for frame in (frames if isinstance(frames, (list, tuple)) else ()) if isinstance(frame, dict)]}


def read_dump(path: str) -> Optional[Dict[str, Any]]:
    """
    One file of the flight recorder: {'entries', 'groups': [(name, ranks)]}, or None if the file is something else.

    :raises ExplainError: if it begins like one and cannot be read
    """
    with open(path, 'rb') as handle:
        if handle.peek(1)[:1] != b'\x80' or os.fstat(handle.fileno()).st_size > MAX_DUMP_BYTES:
            return None
        content = handle.read()
    try:
        data = PlainUnpickler(io.BytesIO(content)).load()
    except Exception as err:    # pylint: disable=broad-except  # pickle's documentation: others than its own, too
        raise ExplainError("%s is not a file of the flight recorder, or was cut off while it was written: %s"
                           % (path, str(err) or "the end is missing"))
    if not isinstance(data, dict) or not isinstance(data.get('entries'), list):
        return None
    configs = data.get('pg_config')
    groups = []
    for config in configs.values() if isinstance(configs, dict) else ():
        if isinstance(config, dict):
            ranks = str(config.get('ranks'))
            groups.append((text_of(config.get('desc')) or text_of(config.get('name')),
                           tuple(int(number) for number in re.findall(r'(?<!\d)\d{1,8}(?!\d)', ranks))))
    return {'entries': [entry_of(entry) for entry in data['entries'] if isinstance(entry, dict)], 'groups': groups}


def find_dumps(directory: str) -> Tuple[Dict[str, Dict[int, Entry]], List[str]]:
    """The flight recorder's files of a directory: ({prefix: {rank: contents}}, remarks)."""
    dumps: Dict[str, Dict[int, Entry]] = {}
    remarks = []
    for name in sorted(os.listdir(directory)):
        match = DUMP_NAME.match(name)
        path = os.path.join(directory, name)
        try:
            dump = read_dump(path) if match and os.path.isfile(path) else None
        except (ExplainError, OSError) as err:
            remarks.append(str(err))
            continue
        if match and dump:
            dumps.setdefault(match.group(1), {})[int(match.group(2))] = dump
    return dumps, remarks


def call_text(entry: Entry) -> str:
    """What a collective was, and where the program called it."""
    own = [frame for frame in entry['frames'] if not re.search(r'/torch/|<frozen|^\?\?', frame[0])] or entry['frames']
    return '%s %s%s' % (entry['name'], json.dumps(entry['sizes']), ' at %s:%d' % own[0] if own else '')


def kind_of(entry: Entry) -> Any:
    """What must be the same on all ranks: the operation, and for those that take as much of each rank, how much."""
    even = re.search(r'all_?reduce|broadcast|_(?:all_?gather|reduce_scatter)_base', entry['name'])
    sizes = entry['sizes'] if even and isinstance(entry['sizes'], list) else []
    return entry['name'], tuple(functools.reduce(operator.mul, (size for size in shape if isinstance(size, int)), 1)
                                for shape in sizes if isinstance(shape, list))


def finished(entry: Entry) -> bool:
    """Whether a collective came to its end. gloo's entries have no state but are retired at the end."""
    return entry['state'] == 'completed' or entry['name'].startswith('gloo') and entry['retired']


def process_groups(dumps: Dict[int, Entry]) -> Dict[Any, Dict[int, Dict[int, Entry]]]:
    """The collectives by process group: {(name, ranks): {rank: {number: entry}}}."""
    groups: Dict[Any, Dict[int, Dict[int, Entry]]] = {}
    for rank, dump in sorted(dumps.items()):
        for key in dump['groups']:
            groups.setdefault(key, {})
        for entry in dump['entries']:
            if entry['p2p']:
                continue
            name = entry['group']
            key = next((key for key in groups if key[0] == name and rank in key[1]), (name, ()))
            groups.setdefault(key, {}).setdefault(rank, {})[entry['number']] = entry
    return groups


def explain_dumps(dumps: Dict[int, Entry]) -> List[str]:
    """What the flight recorders of these ranks say, the most telling first; nothing if all finished the same."""
    said = []
    for (name, members), calls in process_groups(dumps).items():
        if not calls:
            continue
        ranks = sorted(set(members) & set(dumps) or calls)
        last = {rank: max(calls.get(rank) or [0]) for rank in ranks}
        for number in sorted(set.intersection(*[set(calls.get(rank, ())) for rank in ranks])):
            by_call: Dict[Any, List[int]] = {}
            for rank in ranks:
                by_call.setdefault(kind_of(calls[rank][number]), []).append(rank)
            if len(by_call) > 1:
                said.append("group %s, collective %d: ranks made different calls: %s" % (name, number, '; '.join(
                    '%s called %s' % (ranks_text(alike), call_text(calls[alike[0]][number]))
                    for alike in by_call.values())))
                break
        behind = [rank for rank in ranks if last[rank] < max(last.values())]
        if behind:
            number = min(last[rank] for rank in behind) + 1
            others = [rank for rank in ranks if rank not in behind]
            entry = next((calls[rank][number] for rank in others if number in calls.get(rank, {})), entry_of({}))
            said.append("group %s, collective %d (%s): %s did not call it; %s did"
                        % (name, number, call_text(entry), ranks_text(behind), ranks_text(others)))
            for rank in behind[:4]:
                before = calls.get(rank, {}).get(last[rank])
                said.append("  rank %d last called collective %d, %s" % (rank, last[rank], call_text(before))
                            if before else "  rank %d had not called any" % rank)
        else:
            begun = [number for rank in ranks for number, entry in calls.get(rank, {}).items()
                     if not finished(entry)]
            if begun and not said:
                number = min(begun)
                entry = next(calls[rank][number] for rank in ranks if number in calls.get(rank, {}))
                said.append("group %s, collective %d (%s): all ranks with a file called it, but it did not finish: the "
                            "network stalled, or a rank without a file is missing" % (name, number, call_text(entry)))
        missing = sorted(set(members) - set(dumps))
        if missing:
            said.append("group %s: %s left no file (ended earlier, or could not write)" % (name, ranks_text(missing)))
    for rank, dump in sorted(dumps.items()):
        waiting = next((entry for entry in dump['entries'] if entry['p2p'] and not finished(entry)), None)
        if waiting:
            said.append("rank %d is waiting in a send or receive: %s" % (rank, call_text(waiting)))
    return said
