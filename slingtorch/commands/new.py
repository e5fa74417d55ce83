# SPDX-License-Identifier: GPL-2.0-only
"""'slingtorch new': writes an easyconfig and lock file for a user's project, with the PyTorch of another easyconfig."""
import argparse
import glob
import importlib.util
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from typing import Any, Callable, Dict, List, Optional, Tuple

from slingtorch import gpus, lockfile, sites
from slingtorch.commands import lock

# PyTorch's own packages come from --on, whatever a project has locked; others come with the wheel of torch
FAMILY = ('torch', 'torchvision', 'torchaudio')
# these hold only torch and what it needs
TORCH_INDEX = re.compile(r'^https?://download(-r2)?\.pytorch\.org/')
# how packages specify the torch that a wheel was compiled for: 2.8.3+cu12torch2.9cxx11abiTRUE, 2.1.2+pt28cu128
FOR_TORCH = re.compile(r'\+\S*?(?:torch|pt)(\d)\.?(\d+)')
TEXT = '''# Made by 'slingtorch new' from %(source)s, with the PyTorch of %(on)s. Run it again for a new one.
easyblock = 'PythonVenv'

name = '%(name)s'
version = '%(version)s'
versionsuffix = '%(suffix)s'

homepage = 'https://pytorch.org'
description = "%(name)s: a project's own environment with PyTorch %(torch)s"

toolchain = SYSTEM

sources = ['%%(name)s-%%(version)s%%(versionsuffix)s.lock']
checksums = ['%(checksum)s']

%(parameters)s
sanity_check_imports = ['torch', 'torch.distributed']

moduleclass = 'ai'
'''


class Wanted:
    """What a project requires: lines (requirements), projects ([(directory, extras)]), index_urls, links."""

    def __init__(self, path: str) -> None:
        self.directory = os.path.dirname(path)
        self.lines, self.projects, self.index_urls, self.links = [], [], [], []  # type: list, list, list, list
        self.replaced = ''

    def read(self, text: str, path: str) -> None:
        """Add the lines of a requirements file."""
        text = re.sub(r'\s+--hash=\S+', '', re.sub(r'\\\n', ' ', text))
        for line in [re.sub(r'(^|\s)#.*', '', line).strip() for line in text.splitlines()]:
            option, _, value = re.sub(r'^(-\w|--[\w-]+)[\s=]*', r'\1 ', line).partition(' ')
            local = re.match(r'(?:[\w.-]+\s*@\s*)?(?:file:(?://)?)?([./][^;\[]*|)(?:\[(.*)\])?$', line)
            if option in ('-r', '--requirement'):
                self.read_file(os.path.join(os.path.dirname(path), value))
            elif option in ('-f', '--find-links'):
                self.links.append(value if '://' in value else os.path.join(self.directory, value))
            elif option in ('--extra-index-url', '--index-url', '-i'):
                self.index_urls += [] if TORCH_INDEX.match(value) else [value]
            elif option in ('-e', '--editable') or line and local:
                where, _, extras = (value if local is None or option[0] == '-' else line).partition('[')
                where = re.sub(r'^([\w.-]+\s*@\s*)?(file:(//)?)?', '', where.strip())
                self.projects.append((os.path.join(self.directory, where), '[' + extras if extras else ''))
            elif line.startswith('-'):
                raise RuntimeError("%s: an easyconfig cannot have the option '%s'. Remove it; write each line of a "
                                   "constraints file as a requirement" % (path, option))
            elif line:
                self.lines.append(line)

    def read_file(self, path: str) -> None:
        """Add a requirements file."""
        try:
            with open(path, encoding='utf-8-sig') as stream:
                text = stream.read()
        except UnicodeDecodeError as err:
            raise RuntimeError("%s is not a text file in UTF-8 (%s): is it a requirements file?" % (path, err))
        self.read(text, path)


def run_uv(uv: str, words: List[str], what: str, directory: str, settings: Dict[str, str]) -> str:
    """The output of a uv command; RuntimeError with uv's message if it fails."""
    options, env = lockfile.uv_settings(settings, [])
    done = subprocess.run([uv] + words + (options if words[0] == 'build' else []), cwd=directory, env=env,
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          universal_newlines=True)
    if done.returncode:
        raise RuntimeError("%s failed. The output of uv is:\n%s" % (what, done.stderr.strip()[-2000:]))
    return done.stdout


def read_toml(path: str) -> Dict[str, Any]:
    """The content of a pyproject.toml or uv.lock."""
    try:
        toml = importlib.import_module('tomllib' if sys.version_info >= (3, 11) else 'pip._vendor.tomli')  # type: Any
        with open(path, encoding='utf-8') as stream:
            return dict(toml.loads(stream.read()))
    except (ImportError, ValueError) as err:
        raise RuntimeError("%s cannot be read: %s. For a project, 'uv lock' writes a uv.lock: name that" % (path, err))


def fault_of(project: Any) -> str:
    """What in a project's table does not have the form of pyproject.toml; '' if nothing."""
    if not isinstance(project, dict):
        return "project must be a table"
    if not isinstance(project.get('requires-python', ''), str):
        return "requires-python must be a text"
    optional = project.get('optional-dependencies', {})
    lists = [project.get('dependencies', []), *(optional.values() if isinstance(optional, dict) else [optional])]
    if not all(isinstance(entry, list) and all(isinstance(line, str) for line in entry) for entry in lists):
        return "dependencies and each of the optional-dependencies must be lists of texts"
    return ''


def read_project(uv: str, path: str, extras: List[str], settings: Dict[str, str]) -> Tuple[Wanted, str]:
    """What a project requires, and the marker of the machines that it supports; '' for all."""
    wanted, name = Wanted(path), os.path.basename(path)
    if not name.endswith('.toml') and name != 'uv.lock':
        if extras:
            raise RuntimeError("--extra is for a project's pyproject.toml or uv.lock. In %s, write the extra behind "
                               "its package: NAME[%s]" % (path, extras[0]))
        wanted.read_file(path)
        return wanted, ''
    toml = read_toml(path)
    project = toml if name == 'uv.lock' else toml.get('project', {})
    fault = fault_of(project)
    if fault:
        raise RuntimeError("%s does not have the form of a project: %s" % (path, fault))
    markers = [re.sub(r'^\s*([<>=!~]+)\s*(\S+)\s*$', r"python_full_version \1 '\2'", part)
               for part in project.get('requires-python', '').split(',') if part]
    if project is toml:
        export = ['export', '--frozen', '--no-hashes', '--no-header', '--no-annotate', '--no-dev']
        export += [word for extra in extras for word in ('--extra', extra)]
        what = "Reading %s" % path
        full = run_uv(uv, export, what, wanted.directory, settings)
        pinned = dict(re.findall(r'(?m)^(%s)==(\S+)' % '|'.join(FAMILY), full))
        family = [package for package in FAMILY if package in pinned]
        wanted.replaced = ', '.join('%s %s' % pair for pair in pinned.items())
        export += [word for package in family for word in ('--prune', package)]
        wanted.lines += family[family[:1] == ['torch']:]
        wanted.read(run_uv(uv, export, what, wanted.directory, settings), path)
        markers += [' or '.join('(%s)' % marker for marker in toml.get('supported-markers', []))]
    elif 'build-system' in toml:
        # uv only warns of these; those of a project whose build computes them are not known here
        known = {lockfile.normalised(extra) for extra in project.get('optional-dependencies', {})}
        unknown = [extra for extra in extras if lockfile.normalised(extra) not in known]
        if unknown and project and 'optional-dependencies' not in str(project.get('dynamic')):
            raise RuntimeError("%s does not have the extra '%s'" % (path, unknown[0]))
        wanted.projects.append((wanted.directory, '[%s]' % ','.join(extras) if extras else ''))
    else:
        try:
            optional = toml['project'].get('optional-dependencies', {})
            wanted.lines += sum([optional[extra] for extra in extras], project.get('dependencies', []))
        except KeyError as err:
            raise RuntimeError("%s does not have %s" % (path, err))
    return wanted, ' and '.join('(%s)' % marker for marker in markers if marker)


def chosen_python(command: Optional[str], site: Any, on: Dict[str, Any]) -> str:
    """Version (major.minor) of the Python that eb will use: that of the site's role, or of a command."""
    role = ''
    if site.generations and any(entry.startswith('python') for entry in on['site_dependencies']) and not command:
        generation = site.generation(os.environ.get(sites.GENERATION_VARIABLE), on['file'])
        role = site.generations[generation].get('python', '')
    found = re.search(r'/(3\.\d+)', role)
    if found:
        version, where = found.group(1), "the site's role python (%s)" % role
    else:
        where = command or 'python3'
        path = shutil.which(where)
        done = subprocess.run([path or 'false', '-c', 'import sys; print("%d.%d" % sys.version_info[:2])'],
                              stdout=subprocess.PIPE, universal_newlines=True)
        version = done.stdout.strip()
        if not version:
            raise RuntimeError("There is no working Python '%s'. Load a module with one, or name another with "
                               "--python" % where)
    if version not in on['python_versions']:
        raise RuntimeError("%s has packages for Python %s, but %s is Python %s. Load a module with one of these, or "
                           "name one with --python" % (on['file'], ', '.join(on['python_versions']), where, version))
    return version


def read_on(name: Optional[str], root: str, site: Any) -> Dict[str, Any]:
    """The easyconfig whose PyTorch to use: its parameters, file (name) and pins (from its lock file)."""
    fitting = gpus.fitting_easyconfig(site_gpu=site.gpu, toolkit=site.plugin_toolkit())[0]
    path = lock.find_easyconfig(name or fitting or gpus.CPU, root)
    on, locked = lock.parameters_of(path), os.path.splitext(path)[0] + '.lock'
    text = open(locked).read() if os.path.isfile(locked) else ''
    pins = dict(re.findall(r'^(%s)==([^\s;]+)' % '|'.join(FAMILY), text, re.M))
    if on.get('easyblock') != 'PythonVenv' or 'torch' not in pins:
        raise RuntimeError("--on %s is not a PythonVenv easyconfig with a lock file of PyTorch beside it: use another "
                           "one ('eb --search PyTorch-'), or make the lock file: slingtorch lock %s"
                           % (os.path.basename(path), path))
    return dict({'python_versions': [], 'site_dependencies': [], 'versionsuffix': '', 'index_urls': []}, **dict(
        on, file=os.path.basename(path), pins=pins, more_urls=re.findall(r'^--extra-index-url (\S+)', text, re.M)))


def build_wheels(uv: str, pip: str, wanted: Wanted, python: str, directory: str, settings: Dict[str, str],
                 say: Callable[[str], None]) -> None:
    """Build wheels of the projects of `wanted` (of requirements with the pip of `pip`), and require these versions."""
    for number, (project, extras) in enumerate(wanted.projects):
        say("building a wheel of %s" % project)
        room = os.path.join(directory, str(number))
        if extras is None or project.endswith('.whl'):
            words = [pip, '-m', 'pip', 'wheel', '--no-deps', '--quiet', '--wheel-dir', room, project]
            if subprocess.run(words, cwd=wanted.directory, stdin=subprocess.DEVNULL).returncode:
                raise RuntimeError("Building a wheel of %s failed (the reason is above)" % project)
        else:
            run_uv(uv, ['build', '--wheel', '--no-progress', '--python', python, '--out-dir', room, project],
                   "Building a wheel of %s" % project, wanted.directory, settings)
        for path in glob.glob(os.path.join(glob.escape(room), '*.whl')):
            name, version = os.path.basename(path).split('-')[:2]
            wanted.lines.append('%s%s==%s' % (name.replace('_', '-'), extras or '', version))
            os.rename(path, os.path.join(directory, os.path.basename(path)))


def check_for_torch(text: str, on: Dict[str, Any]) -> None:
    """Refuse wheels that were compiled for another torch than that of `on`."""
    for name, version in re.findall(r'^([\w.-]+)==([^\s;]+)', text, re.M):
        found = FOR_TORCH.search(version)
        if found and list(found.groups()) != on['pins']['torch'].split('.')[:2]:
            raise RuntimeError("%s %s is compiled for PyTorch %s, but %s has %s. Name a wheel that fits (%s @ "
                               "https://...whl), or use another --on"
                               % (name, version, '.'.join(found.groups()), on['file'], on['pins']['torch'], name))


def without_solution(error: RuntimeError, source: str, on: Dict[str, Any]) -> RuntimeError:
    """uv's message about packages that do not go together, with the remedy for a project."""
    because = '\n'.join(re.findall(r'(?:cause: |^\s+)((?:Because|And) .*)', str(error), re.M))
    if not because:
        return error
    return RuntimeError("the packages cannot be had together. The output of uv is:\n%s\nChange a requirement in %s, "
                        "name another easyconfig than %s with --on, or, where only a wheel is missing, build one: "
                        "--build REQUIREMENT" % (because, source, on['file']))


def run(args: argparse.Namespace, root: str, site: Any, groups: List[str], say: Callable[[str], None]) -> int:
    """slingtorch new"""
    if not re.match(r'[A-Za-z][\w.+-]*$', args.name):
        raise RuntimeError("'%s' is not a valid module name: use letters, digits, '_', '.', '+' and '-'" % args.name)
    uv, here = lockfile.need_uv(), os.getcwd()
    on = read_on(args.on, root, site)
    python = sys.executable if importlib.util.find_spec('pip') else args.python or 'python3'
    settings = lockfile.pip_settings(python)
    wanted, marker = read_project(uv, os.path.abspath(args.source), args.extra, settings)
    version = chosen_python(args.python, site, on)
    machine = site.processor if site.generations else os.uname().machine
    platforms = on.get('wheel_platform', 'manylinux_2_28_x86_64')
    platforms = [text for text in (platforms if isinstance(platforms, list) else [platforms]) if text.endswith(machine)]
    if not platforms:
        raise RuntimeError("%s has no wheel for the processor type %s: use another --on" % (on['file'], machine))
    target = lockfile.Target(version, platforms[0])
    if marker and 'pip' not in lockfile.uv_compile(uv, target, settings, [], '--no-deps', '-',
                                                   text='pip ; %s\n' % marker).stdout:
        raise RuntimeError("%s is for %s, but this is Python %s on %s. Load a module with another Python (or name one "
                           "with --python), or lock the project for this platform, too"
                           % (args.source, marker, version, platforms[0]))
    pins = on['pins']
    if wanted.replaced:
        say("%s has %s; %s replaces them (PyTorch %s)" % (args.source, wanted.replaced, on['file'], pins['torch']))
    with tempfile.TemporaryDirectory(dir=here, prefix='.new-') as room:
        # a newer Python can build for an older one
        wanted.projects += [(requirement, None) for requirement in args.build]
        build_wheels(uv, python, wanted, args.python or version, room, settings, say)
        named = {lockfile.normalised(re.split(r'[^\w.-]', line)[0]) for line in wanted.lines}
        lines = ['%s==%s' % (name, pins[name]) for name in FAMILY if name in pins and name in named.union(['torch'])]
        lines += [line for line in dict.fromkeys(wanted.lines + ['pip']) if line not in FAMILY or line not in pins]
        recipe = {'wanted': lines, 'index_urls': on['index_urls'] + wanted.index_urls, 'python_versions': [version],
                  'platforms': platforms, 'more_urls': on['more_urls'], 'links': wanted.links}
        for number in itertools.count(1):
            day = time.strftime('%Y%m%d') + ('.%d' % number if number > 1 else '')
            stem = '%s-%s%s' % (args.name, day, on['versionsuffix'])
            if not glob.glob(os.path.join(glob.escape(here), stem + '.*')):
                break
        locked = os.path.join(room, stem + '.lock')
        try:
            lockfile.lock(recipe, stem + '.eb', locked, python, lambda text: say(text.replace(room, here)), settings)
        except RuntimeError as err:
            raise without_solution(err, os.path.basename(args.source), on)
        with open(locked) as stream:
            check_for_torch(stream.read(), on)
        shown = [('site_dependencies', on['site_dependencies']), ('python_versions', [version]),
                 ('wheel_platform', platforms), ('index_urls', recipe['index_urls'] or on['more_urls'])]
        # an image if the site stages jobs automatically
        shown += [('python_command', args.python),
                  ('environment_image', 'SLINGTORCH_STAGE_NODES' in site.env_values(groups))]
        parameters = ''.join('%s = %r\n' % (key, value) for key, value in shown if value)
        parameters += 'python_packages = [\n%s]\n' % ''.join('    %r,\n' % line for line in lines)
        with open(os.path.join(room, stem + '.eb'), 'w') as stream:
            stream.write(TEXT % {'source': os.path.basename(args.source), 'on': on['file'], 'name': args.name,
                                 'version': day, 'suffix': on['versionsuffix'], 'torch': pins['torch'],
                                 'checksum': lockfile.sha256(locked), 'parameters': parameters})
        # the easyconfig last, because it is incomplete without the other files
        for path in sorted(glob.glob(os.path.join(glob.escape(room), '*.*')), key=lambda path: path.endswith('.eb')):
            os.replace(path, os.path.join(here, os.path.basename(path)))
    print(os.path.join(here, stem + '.eb'))
    say("now: eb %s; module load %s/%s%s" % (os.path.join(here, stem + '.eb'), args.name, day,
                                             on['versionsuffix']))
    return 0
