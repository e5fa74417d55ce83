# SPDX-License-Identifier: GPL-2.0-only
"""'slingtorch status': what is installed, with which runscripts and site values, and what the bundle would now install
differently. Module files of EasyBuild lead to the installations. The record of each is written by RunScripts
(easyblocks/generic/runscripts.py) beside the runscripts."""
import argparse
import contextlib
import json
import os
import pathlib
import re
import shlex
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

from slingtorch import __version__, bundle_root, lockfile, sites, table
from slingtorch.gpus import numbers

RECORD = os.path.join('runscripts', 'lib', 'installed.json')
# the line of a module file that names the installation (INSTALLDIR_REGEX in easybuild/tools/module_generator.py), and
# the variable that all modules with runscripts set
ROOT_REGEX = re.compile(r'^(?:local root\s+=\s+"(.*)"|set root\s+(.*))$', re.M)
MARK = 'RUNSCRIPTS'


def module_files(directory: str, unread: List[str]) -> Iterator[str]:
    """Paths of all files below a directory with modules, sorted."""
    def note(err: OSError) -> None:
        if not isinstance(err, FileNotFoundError):  # nothing is installed yet
            unread.append('%s: %s' % (err.filename, err.strerror))
    for path, directories, names in os.walk(directory, onerror=note):
        directories.sort()
        for name in sorted(names):
            if not re.search(r'^\.|\.bak_\d{14}_', name):  # backups that EasyBuild keeps
                yield os.path.join(path, name)


def installations(directory: str, unread: List[str]) -> Iterator[Tuple[str, str]]:
    """Module and directory of each installation with runscripts; adds to unread what could not be read, and why."""
    for path in module_files(directory, unread):
        try:
            with open(path, errors='replace') as stream:
                text = stream.read()
        except OSError as err:
            unread.append('%s: %s' % (path, err.strerror))
            continue
        found = ROOT_REGEX.search(text)
        if found and MARK in text:
            root = found.group(1) or found.group(2)
            # with --module-only, EasyBuild also makes modules of software that was never installed
            if os.path.lexists(os.path.join(root, 'runscripts')) or not os.access(root, os.X_OK):
                yield os.path.relpath(re.sub(r'\.lua$', '', path), directory), root


def sha256(path: str) -> Optional[str]:
    """sha256 of a file, None if it does not exist."""
    with contextlib.suppress(FileNotFoundError):
        return lockfile.sha256(path)
    return None


def differences(root: str, record: Dict[str, Any]) -> List[str]:
    """Phrases about what differs from what the bundle would install now."""
    found, scripts = [], os.path.join(bundle_root(), 'runscripts')
    if record['slingtorch'] != __version__:
        kind = 'older' if numbers(record['slingtorch']) < numbers(__version__) else 'newer'
        found.append('%s: slingtorch %s' % (kind, record['slingtorch']))
    changed = [target for target, file in record['files'].items()
               if sha256(os.path.join(scripts, file['source'])) != file['sha256']]
    edited = [target for target, file in record['files'].items()
              if sha256(os.path.join(root, target)) != file['sha256']]
    for what, targets in [('not as in the bundle', changed), ('edited after installation', edited)]:
        if targets:
            names = sorted(re.sub('^runscripts/', '', target) for target in targets)
            found.append('%s: %s%s' % (what, ', '.join(names[:3]),
                                       ' and %d more' % (len(names) - 3) if len(names) > 3 else ''))
    if record['site']:
        try:
            if sites.load(record['site']).digest(record['groups']) != record['values']:
                found.append("the values of site '%s' have changed" % record['site'])
        except RuntimeError as err:
            found.append(str(err))
    return found


def describe(module: str, root: str) -> Dict[str, Any]:
    """An installation, for JSON: 'state' is current, different (then 'why' lists the differences) or unreadable."""
    entry = {'module': module, 'root': root, 'slingtorch': None, 'runscripts': None, 'site': None, 'groups': [],
             'values': None, 'easyconfig': None, 'state': 'different', 'why': []}  # type: Dict[str, Any]
    try:
        with open(os.path.join(root, RECORD)) as stream:
            record = json.load(stream)
        entry.update({key: record[key] for key in entry if key in record})
        entry['why'] = differences(root, record)
        entry['state'] = 'different' if entry['why'] else 'current'
    except FileNotFoundError:
        if not os.path.exists(root):
            return dict(entry, why=['%s is gone: remove the module, or install it again' % root], owner=None)
        entry['why'] = ['older: installed by a slingtorch that wrote no record']
    except (ValueError, KeyError, TypeError) as err:
        entry['why'] = ['%s is damaged: %s' % (os.path.join(root, RECORD), err)]
    except OSError as err:
        entry.update(state='unreadable', why=['%s: %s' % (os.path.join(root, RECORD), err)])
    entry['easyconfig'] = installed_easyconfig(root, entry['easyconfig'])
    try:
        own = os.stat(root).st_uid == os.geteuid() or os.access(root, os.W_OK)
        entry['owner'] = None if own else pathlib.Path(root).owner()
    except KeyError:
        entry['owner'] = str(os.stat(root).st_uid)
    except OSError:
        entry['owner'] = 'unknown'
    return entry


def installed_easyconfig(root: str, name: Optional[str]) -> Optional[str]:
    """Path of the copy of the easyconfig that EasyBuild has put into an installation; None without one."""
    try:
        names = [entry for entry in os.listdir(os.path.join(root, 'easybuild')) if entry.endswith('.eb')]
    except OSError:
        return None
    names = [name] if name in names else names
    return os.path.join(root, 'easybuild', names[0]) if len(names) == 1 else None


def renewal(entries: List[Dict[str, Any]], active: Optional[str], groups: List[str]) -> List[str]:
    """Shell commands that renew the different ones of these entries (from describe()): one command for the site and
    groups of this shell's activation, and one for each other site and groups."""
    bundled = {name: os.path.join(path, name)
               for path, _, names in os.walk(os.path.join(bundle_root(), 'easyconfigs')) for name in names}
    wanted = {}  # type: Dict[Tuple[Optional[str], str], List[str]]
    for entry in entries:
        if entry['state'] == 'different' and entry['easyconfig'] and not entry['owner']:
            key = (entry['site'], ','.join(entry['groups'])) if entry['site'] else (active, ','.join(groups))
            path = entry['easyconfig']
            name = os.path.basename(path)
            same = name in bundled and sha256(bundled[name]) == sha256(path)
            wanted.setdefault(key, []).append(name if same else path)
    commands = []
    for (site, names), easyconfigs in sorted(wanted.items(), key=lambda item: str(item[0])):
        command = 'eb --module-only --force ' + ' '.join(map(shlex.quote, easyconfigs))
        if (site, names) != (active, ','.join(groups)):
            command = '(eval "$(slingtorch env --quiet --site %s --with %s)" && %s)' % (
                site, shlex.quote(names), command)
        commands.append(command)
    loaded = os.environ.get('LOADEDMODULES', '').split(':')
    named = [shlex.quote(entry['module']) for entry in entries if commands and entry['module'] in loaded]
    # EasyBuild does not install a module that is loaded
    return ['module unload ' + ' '.join(named)] * bool(named) + commands


def as_table(entries: List[Dict[str, Any]]) -> str:
    """The installations as a table."""
    rows = [('module', 'slingtorch', 'runscripts', 'site values', 'state')]
    for entry in entries:
        values = ' '.join(filter(None, [entry['site'], entry['values'], ','.join(entry['groups'])]))
        why = entry['why'] + ["belongs to %s" % entry['owner']] * bool(entry['owner'] and entry['why'])
        rows.append((entry['module'], entry['slingtorch'] or '-', entry['runscripts'] or '-', values or '-',
                     '; '.join(why) or entry['state']))
    return table(rows)


def run(args: argparse.Namespace, directory: str, note: Callable) -> int:
    """slingtorch status, for EasyBuild's directory of modules; 0: everything is current, 3: not everything."""
    unread = []  # type: List[str]
    try:
        active = sites.choose().site.name
    except sites.SiteError:
        active = None
    entries = [describe(module, path) for module, path in installations(directory, unread)]
    commands = renewal(entries, active, sites.chosen_groups())
    if args.json:
        print(json.dumps({'slingtorch': __version__, 'modules': directory, 'installations': entries, 'renew': commands,
                          'unread': unread}, indent=2, sort_keys=True))
    elif entries:
        print(as_table(entries), end='')
        if commands:
            print("\nThis renews the runscripts and modules of your installations in seconds; running jobs keep the "
                  "old ones:\n" + '\n'.join(commands))
    if not entries:
        note("nothing with runscripts is installed in %s (see eb --show-config)" % directory)
    for problem in unread:
        note("cannot read " + problem)
    return 3 if unread or any(entry['state'] != 'current' for entry in entries) else 0
