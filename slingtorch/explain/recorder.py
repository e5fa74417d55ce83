# SPDX-License-Identifier: GPL-2.0-only
"""
The files of PyTorch's flight recorder: which rank did not come to which collective, and where in the program.

They are pickles. What reads them here knows numbers, texts and containers alone, takes no more memory than a file is
long, and keeps of its contents only what has the form that PyTorch writes (torch/csrc/distributed/c10d/FlightRecorder).
"""
import json
import os
import re
import struct
from typing import Any, Callable, Dict, List, Optional, Tuple

from slingtorch.explain.tables import ExplainError
from slingtorch.job.findings import ranks_text

Entry = Dict[str, Any]
DUMP_NAME = re.compile(r'^(.*?)(\d+)$')
MAX_DUMP_BYTES = 1 << 28
MAX_TEXT = 500          # characters of a name, a size or a path that are kept
MARK = object()

# opcodes that are followed by a number of this form, and then by so many bytes
SIZED = {b'X': '<I', b'\x8c': '<B', b'\x8d': '<Q', b'U': '<B', b'T': '<I', b'B': '<I', b'C': '<B', b'\x8e': '<Q',
         b'\x8a': '<B', b'\x8b': '<I'}
NUMBERS = {b'J': '<i', b'K': '<B', b'M': '<H', b'G': '>d'}
CONSTANTS: Dict[bytes, Callable[[], Any]] = {
    b'N': lambda: None, b'\x88': lambda: True, b'\x89': lambda: False, b'(': lambda: MARK,
    b'}': dict, b']': list, b')': tuple}
PUT, GET = {b'q': '<B', b'r': '<I'}, {b'h': '<B', b'j': '<I'}


def unpickled(data: bytes) -> Any:
    """
    The numbers, texts and containers of a pickle (protocols 2 to 5).

    :raises ValueError, IndexError, KeyError, TypeError, struct.error: for anything else
    """
    stack: List[Any] = []
    memo: Dict[int, Any] = {}
    place = 0

    def number(form: str) -> Any:
        nonlocal place
        value = struct.unpack_from(form, data, place)[0]
        place += struct.calcsize(form)
        return value

    def marked() -> List[Any]:
        start = next(index for index in range(len(stack) - 1, -1, -1) if stack[index] is MARK)
        items = stack[start + 1:]
        del stack[start:]
        return items

    while True:
        code, place = data[place:place + 1], place + 1
        if code in SIZED:
            size = number(SIZED[code])
            value = data[place:place + size]
            if len(value) < size:
                raise ValueError("it ends within a string")
            place += size
            stack.append(int.from_bytes(value[:16], 'little', signed=True) if code in b'\x8a\x8b'
                         else value.decode('utf-8', 'replace'))
        elif code in NUMBERS:
            stack.append(number(NUMBERS[code]))
        elif code in PUT or code == b'\x94':
            memo[number(PUT[code]) if code in PUT else len(memo)] = stack[-1]
        elif code in GET:
            stack.append(memo[number(GET[code])])
        elif code and code in b'ute':
            items = marked()
            if code == b't':
                stack.append(tuple(items))
            elif code == b'e':
                stack[-1].extend(items)
            else:
                stack[-1].update(zip(items[::2], items[1::2]))
        elif code == b'a':
            stack[-2].append(stack.pop())
        elif code == b's':
            key, item = stack[-2:]
            del stack[-2:]
            stack[-1][key] = item
        elif code and code in b'\x85\x86\x87':
            count = code[0] - 0x84
            stack[-count:] = [tuple(stack[-count:])]
        elif code in CONSTANTS:
            stack.append(CONSTANTS[code]())
        elif code in (b'\x80', b'\x95'):
            number('<B' if code == b'\x80' else '<Q')
        elif code == b'.':
            return stack[-1]
        else:
            raise ValueError("it has the opcode %r, which the flight recorder never writes (its files name no classes)"
                             % code)


def text_of(value: Any) -> str:
    """A text or number as a short text; of anything else ''."""
    return str(value)[:MAX_TEXT] if isinstance(value, (str, int, float)) else ''


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
        start = handle.peek(1)[:1]
        if start not in (b'\x80', b'{') or os.fstat(handle.fileno()).st_size > MAX_DUMP_BYTES:
            return None
        content = handle.read()
    try:
        data = json.loads(content.decode()) if start == b'{' else unpickled(content)
    except (ValueError, LookupError, TypeError, AttributeError, StopIteration, struct.error, RecursionError) as err:
        raise ExplainError("%s is not a file of the flight recorder, or was cut off while it was written: %s"
                           % (path, err))
    if not isinstance(data, dict) or not isinstance(data.get('entries'), list):
        return None
    configs = data.get('pg_config')
    groups = []
    for config in configs.values() if isinstance(configs, dict) else ():
        if isinstance(config, dict):
            ranks = config.get('ranks')
            ranks = ranks if isinstance(ranks, str) else str(sizes_of(ranks))
            groups.append((text_of(config.get('desc')) or text_of(config.get('name')) or 'default_pg',
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
            key = next((key for key in groups if key[0] == name and rank in key[1]),
                       next((key for key in groups if key[0] in (name, 'default_pg') and name in (key[0], 'default_pg')
                             and rank in key[1]), (name, ())))
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
            by_name: Dict[str, List[int]] = {}
            for rank in ranks:
                by_name.setdefault(calls[rank][number]['name'], []).append(rank)
            if len(by_name) > 1:
                said.append("group %s, collective %d: ranks made different calls: %s" % (name, number, '; '.join(
                    '%s called %s' % (ranks_text(alike), call_text(calls[alike[0]][number]))
                    for alike in by_name.values())))
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
    return list(dict.fromkeys(said))
