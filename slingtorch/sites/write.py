# SPDX-License-Identifier: GPL-2.0-only
"""slingtorch site new: writes a site file for the machine that it runs on, or completes one."""
import argparse
import contextlib
import os
import pathlib
import re
import shlex
import shutil
import socket
import sys
import tempfile
from typing import Any, Dict, List, Mapping, Optional, Tuple

from slingtorch import sites
from slingtorch.sites import SiteError
from slingtorch.sites.draft import Draft
from slingtorch.sites.probe import (LAUNCHERS, LIMIT, Env, Loaded, Text, choose_modules, find_place, find_scheduler,
                                    gather, load_modules, one_line)

UNSEEN = '#   not seen: '


def remarks(draft: Draft) -> List[str]:
    """Comment lines about what was seen and what was not."""
    return (['#   %s: %s\n' % (what, one_line(words)) for what, words in draft.seen.items()]
            + [UNSEEN + '%s: %s\n' % (what, one_line(why)) for what, why in draft.unseen.items()])


def section_text(name: str, keys: Dict[str, str]) -> str:
    """The text of a section, after an empty line."""
    return '\n[%s]\n' % name + ''.join('%s =%s\n' % (key, value if key == 'values' else ' ' + one_line(value))
                                       for key, value in keys.items())


def merge(text: str, sections: Dict[Any, Dict[str, Any]], draft: Draft) -> Tuple[str, List[str]]:
    """
    Add what is missing to the text of a site file; existing lines stay.

    :param sections: the sections of the file, as sites.read_sections returns them
    :return: (new text, [what was added])
    """
    added = []
    old = sections['site', None, None]
    for key, other in (('gpu', 'gpus_per_node'), ('gpus_per_node', 'gpu'), ('network', 'network')):
        new = draft.site[key]
        if new != 'any' and old[key] == old[other] == 'any':
            text = re.sub(r'(?m)^(\s*%s\s*=\s*)any\s*?$' % key, r'\g<1>' + new, text, 1)
            added.append('%s = %s' % (key, new))
    if 'include' in draft.site and 'include' not in old and old['network'] in ('any', draft.site['network']):
        text = re.sub(r'(?m)^(\s*network\s*=.*\n)', r'\g<1>include = %s\n' % draft.site['include'], text, 1)
        added.append('include = ' + draft.site['include'])
    more = ''
    for name, keys in draft.sections.items():
        match = re.match(r'(\S+) (\S+)(?: in (\S+))?$', name)
        if match and match.groups() not in sections and not name.startswith('detect'):
            more += section_text(name, keys)
            added.append('[%s]' % name)
    if added:
        # remove remarks about missing things that are missing no more
        lines = [line for line in text.rstrip('\n').splitlines(True)
                 if not line.startswith(UNSEEN) or line[len(UNSEEN):].partition(':')[0] in draft.unseen]
        more = "\n\n# Added %s, a %s. Seen there:\n%s%s" % (
            draft.here, draft.place.kind, ''.join(line for line in remarks(draft) if line not in lines), more)
        text = ''.join(lines) + more
    return text, added


def check_name(name: str, environ: Env) -> None:
    """Raise a SiteError if a site cannot have this name, or another site has it."""
    if not re.match(r'[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\Z', name):
        raise SiteError("'%s' is not a valid site name: use up to 64 letters, digits, '_', '.' and '-', and begin "
                        "with a letter or digit." % one_line(name))
    path = sites.find_files(sites.SITE, environ).get(name)
    if path and os.path.dirname(path) != sites.user_directory(environ):
        raise SiteError("The site '%s' already exists in %s: choose another name, or view it: slingtorch sites %s"
                        % (name, path, name))


def own_directory(environ: Env) -> str:
    """The user's own directory with sites; created if it does not exist."""
    path = sites.user_directory(environ)
    if not path:
        raise SiteError("There is no home directory to write to: set XDG_CONFIG_HOME to a directory of yours, now "
                        "and whenever you use the site.")
    try:
        os.makedirs(os.path.dirname(os.path.dirname(path)), exist_ok=True)
        for directory in (os.path.dirname(path), path):
            pathlib.Path(directory).mkdir(0o700, exist_ok=True)
    except OSError as err:
        raise SiteError("Your site files go into %s, which cannot be created (%s). Set XDG_CONFIG_HOME to a "
                        "directory of yours, now and whenever you use the site." % (path, err.strerror))
    sites.directories(environ)      # raises an error if others may write to it
    return path


def write(path: str, text: str, name: str, environ: Env) -> None:
    """Write a site file, after checking that the bundle can read it."""
    temporary = ''
    try:
        handle, temporary = tempfile.mkstemp(dir=os.path.dirname(path), prefix='.', suffix='.tmp')
        with os.fdopen(handle, 'w', encoding='utf-8') as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        sites.read_site(name, temporary, environ)
        os.chmod(temporary, 0o644)
        os.replace(temporary, os.path.realpath(path))
    except OSError as err:
        raise SiteError("%s could not be written: %s" % (path, err.strerror))
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def run_new(args: argparse.Namespace, environ: Optional[Env] = None,
            evidence: Optional[Dict[str, Text]] = None, host: Optional[str] = None,
            loads: Optional[Mapping[str, Loaded]] = None) -> int:
    """slingtorch site new. Tests pass recorded evidence and loads instead of those of this machine."""
    environ, host, name = dict(os.environ if environ is None else environ), host or socket.gethostname(), args.name
    check_name(name, environ)
    if environ.get('SLURM_PROCID', '0') != '0':
        return 0    # only the first task of a step writes
    path = os.path.join(own_directory(environ), name + sites.SITE)
    there = os.path.exists(path)
    old = pathlib.Path(path).read_text(encoding='utf-8', errors='replace') if there else ''
    if there and not args.complete:
        raise SiteError("The file %s already exists and is not overwritten. Add what it lacks: slingtorch site new "
                        "--complete %s; or move it away" % (path, name))
    if args.complete and not there:
        raise SiteError("There is no file %s to complete. Write it on the login node first: slingtorch site new %s"
                        % (path, name))
    if evidence is None:
        print("Examining this machine, at most %d s." % LIMIT, flush=True)
        evidence = gather(environ)
        loads = load_modules(choose_modules(evidence, environ), environ)
    place = find_place(evidence, environ, host)
    if args.complete and not (environ.get('SLURMD_NODENAME') or environ.get('PBS_JOBID') or place.kind == 'machine'):
        raise SiteError("This is a login node, but only a compute node shows what %s lacks. Run this there: %s "
                        "slingtorch site new --complete %s"
                        % (path, LAUNCHERS[find_scheduler(evidence, environ)], name))
    in_a_job = dict(environ, SLURM_CLUSTER_NAME=place.cluster) if place.cluster else environ
    known = [site.name for site, _ in sites.detected_sites(in_a_job, host) if site.name != name]
    draft = Draft(name, evidence, environ, place, known[0] if known else None, loads or {})
    what = "machine is %s (no scheduler answered)" if place.kind == 'machine' else place.kind + " is %s"
    print("This %s.\n%s" % (what % place.host, ''.join(line[1:] for line in remarks(draft))), end='')

    if args.complete:
        text, added = merge(old, sites.read_sections(path), draft)
        if added:
            write(path, text, name, environ)
        print("Added to %s: %s" % (path, ', '.join(added)) if added else "%s already has everything." % path)
    else:
        head = ("# Site %s, written by 'slingtorch site new' %s, a %s. Edit it as you like; docs/sites.md of "
                "slingtorch\n# describes its form, and 'slingtorch sites %s' checks and shows it.\n#\n"
                "# Seen on this machine:\n" % (name, draft.here, place.kind, name))
        write(path, ''.join([head] + remarks(draft) + [section_text(*item) for item in draft.sections.items()]),
              name, environ)
        print("Written: %s" % path)
    # the shell may not find slingtorch outside an activated environment
    program = 'slingtorch' if shutil.which('slingtorch') else shlex.quote(os.path.abspath(sys.argv[0]))
    if not draft.in_job:
        command = LAUNCHERS[draft.site['scheduler']]
        command += ' --partition=' + draft.seen['partition'] if 'partition' in draft.seen else ''
        command += ' --gres=gpu:%d' % draft.gpus_of_job if draft.gpus_of_job else ''
        print("Now add what only a compute node shows%s:\n  %s %s site new --complete %s" % (
            '' if draft.site['scheduler'] == 'slurm' else ', in a job', command, program, name))
    print("Check it, then use it:\n  %s sites %s\n  eval \"$(%s env --site %s)\"" % (program, name, program, name))
    return 0
