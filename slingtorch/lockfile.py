# SPDX-License-Identifier: GPL-2.0-only
"""
Writes and reads the lock file of a PythonVenv easyconfig: for `eb`, which makes one if there is none yet, and for
'slingtorch lock'.

uv resolves the packages for each Python and platform of the easyconfig, whatever machine this runs on. It needs only
metadata, and gets the hashes of the wheels from the pages of the indexes.
"""
import ast
import collections
import hashlib
import os
import re
import shutil
import subprocess
import sys
import urllib.parse
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from slingtorch.job.records import write_whole

PLATFORM_REGEX = re.compile(r'^manylinux_2_(\d+)_(x86_64|aarch64)$')
# the glibc versions of platforms that uv knows (uv help pip compile, --python-platform)
UV_GLIBCS = [17, 28] + list(range(31, 41))
INDEX_FORM = re.compile(r'^(https?|file)://\S+$')
# variables that set how uv works; what it may use comes from pip's settings (uv_settings())
UV_VARIABLES = ('UV_CACHE_DIR', 'UV_HTTP_TIMEOUT', 'UV_HTTP_CONNECT_TIMEOUT', 'UV_KEYRING_PROVIDER', 'UV_SYSTEM_CERTS',
                'UV_NATIVE_TLS')

NOT_FOUND = (
    "No index has this package for this Python and platform: compare version, python_versions and wheel_platform of "
    "the easyconfig with the files that the index lists ('pip config list' shows the indexes that are used besides "
    "index_urls).")
# what uv prints, and the remedy
PROXY_PROBLEM = (
    'InvalidProxyURL|Proxy URL had|Failed to parse: |SOCKS support|[Ii]nvalid proxy',
    "The address of a proxy is not valid: $https_proxy, $http_proxy and $all_proxy ('env | grep -i proxy' shows them) "
    "must have the form http://HOST:PORT. Correct them, or unset them if no proxy is needed.")
REMEDIES = [
    ('Hash mismatch', "An index delivered a different file from the one that its page announces. Nothing "
     "was written. Try again; if this repeats, do not install that file, and tell the operators of the index."),
    PROXY_PROBLEM,
    # uv also prints 'No solution found' for these
    ('conflicting dependencies|are incompatible',
     "The packages conflict: change python_packages or extra_packages of the easyconfig."),
    ('No solution found', NOT_FOUND),
    ('Failed to fetch|Request failed|error sending request', "The index does not answer. Run eb --fetch on a machine "
     "that reaches it, or use a proxy ($https_proxy); the installation itself needs no network."),
]

Recipe = Dict[str, Any]     # what the easyconfig specifies: see check_recipe()
Settings = Dict[str, str]   # of pip
Say = Callable[[str], None]
Target = collections.namedtuple('Target', 'python platform')
# link: where to find a wheel that is on no index: its address (NAME @ ADDRESS), or a page for --find-links
Package = collections.namedtuple('Package', 'name version hashes link')


def check_recipe(recipe: Recipe, file_name: str) -> None:
    """Raise RuntimeError if a recipe (lists wanted, index_urls, python_versions, platforms) cannot be locked."""
    pythons, platforms = recipe['python_versions'], recipe['platforms']
    if not pythons or not all(re.match(r'^3\.\d+$', text) for text in pythons):
        raise RuntimeError("%s: python_versions is %r, but must list the Python versions of the packages, such as "
                           "['3.12']" % (file_name, pythons))
    if not platforms or not all(PLATFORM_REGEX.match(str(text)) for text in platforms):
        raise RuntimeError("%s: wheel_platform is %s, but must have the form manylinux_2_28_x86_64 (glibc 2.28 or "
                           "newer), or be a list of these" % (file_name, ', '.join(map(repr, platforms))))
    options = [text for text in recipe['wanted'] if text.startswith('-')]
    if options:
        raise RuntimeError("%s: %s is an option, not a package. Put indexes into index_urls" % (file_name, options[0]))
    for address in recipe['index_urls'] + [text.partition('@')[2].strip() for text in recipe['wanted']]:
        if '@' in address.partition('://')[2].partition('/')[0]:
            raise RuntimeError("%s: an address contains a user or password, which the lock file would reveal. "
                               "Put it into ~/.netrc, which pip reads" % file_name)
        if address in recipe['index_urls'] and not INDEX_FORM.match(address):
            raise RuntimeError("%s: index_urls has %r, which is not an address (https://...)" % (file_name, address))


def recipe_of(values: Any) -> Recipe:
    """The recipe in the parameters of an easyconfig."""
    platforms = values['wheel_platform']
    return {'wanted': list(values['python_packages']) + list(values['extra_packages']),
            'index_urls': list(values['index_urls']), 'python_versions': list(values['python_versions']),
            'platforms': platforms if isinstance(platforms, list) else [platforms]}


def normalised(name: str) -> str:
    """Name of a package in the form of lock files (PEP 503)."""
    return re.sub('[-_.]+', '-', name).lower()


def pinned(wanted: Sequence[str]) -> Dict[str, str]:
    """{name: version} of the packages that are required in exactly one version."""
    found = [re.match(r'([\w.-]+)==([^\s*;,=]+)$', word) for word in wanted]
    return {match.group(1): match.group(2) for match in found if match}


def wheel_dir(source_path: str, name: str) -> str:
    """Directory of a software's wheels in one of EasyBuild's source paths."""
    return os.path.join(source_path, name.lower()[0], name, 'wheels')


def find_uv() -> Optional[str]:
    """$SLINGTORCH_UV (empty: none), else the uv beside this Python or in $PATH; None if it does not run."""
    beside = shutil.which('uv', path=os.path.dirname(sys.executable))
    uv = os.environ.get('SLINGTORCH_UV', beside or shutil.which('uv'))
    try:
        subprocess.run([uv or '', '--version'], env=uv_environment(), stdout=subprocess.DEVNULL,
                       stderr=subprocess.DEVNULL, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return uv


def need_uv() -> str:
    """Path of uv; RuntimeError without one."""
    uv = find_uv()
    if not uv:
        raise RuntimeError("This needs uv, which comes with slingtorch on Python 3.8 or newer: %s -m pip install uv, "
                           "or export SLINGTORCH_UV=/path/to/uv" % sys.executable)
    return uv


def uv_environment(kept: Sequence[str] = ()) -> Dict[str, str]:
    """The environment without the user's settings of uv (except those kept): they could change the packages' origin."""
    env = {name: value for name, value in os.environ.items() if not name.startswith('UV_') or name in kept}
    return dict(env, UV_NO_CONFIG='1', UV_PYTHON_DOWNLOADS='never', UV_NO_WRAP='1', NO_COLOR='1')


def pip_settings(python: str, command: str = 'download', flags: str = '-s') -> Settings:
    """The configuration of a Python's pip for a command, from files and variables: {name of an option: value}.

    RuntimeError if pip cannot read its configuration: without it packages could come from elsewhere.
    """
    # with 'user = true', pip would list only the user's own file
    done = subprocess.run([python, flags, '-m', 'pip', 'config', 'list'], env=dict(os.environ, PIP_USER='0'),
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          universal_newlines=True)
    if done.returncode:
        raise RuntimeError("pip cannot read its configuration: %s. Correct that file" % done.stderr.strip()[-300:])
    settings = {}
    for section in ('global', command, ':env:'):
        for name, value in re.findall(r"^%s\.([\w-]+)=(['\"].*['\"])$" % section, done.stdout, re.M):
            settings[name] = ast.literal_eval(value)
    return settings


def default_index(python: str) -> str:
    """The default index of a Python's pip, from its help text; RuntimeError if that has none."""
    said = subprocess.run([python, '-s', '-m', 'pip', '--isolated', 'download', '--help'], stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, universal_newlines=True).stdout
    found = re.search(r'Package\s+Index\s+\(default\s+(https?://[^)\s]+)\)', said)
    if not found:
        raise RuntimeError("%s -m pip does not show which index it uses. Set one: export PIP_INDEX_URL=ADDRESS"
                           % python)
    return found.group(1)


def uv_settings(settings: Settings, index_urls: List[str]) -> Tuple[List[str], Dict[str, str]]:
    """pip's settings for uv, with the index_urls of the easyconfig first: list of options, dictionary of variables."""
    env = dict(uv_environment(UV_VARIABLES), UV_HTTP_RETRIES='1')
    # let uv compare the versions of all indexes, as pip does: PyTorch's indexes have old versions of common packages.
    # If several have a version, uv uses the first of these indexes (uv help pip compile, --index-strategy)
    options = ['--index-strategy', 'unsafe-best-match']
    options += [word for address in index_urls for word in ('--index', address)]
    for option, name in [('--index', 'extra-index-url'), ('--default-index', 'index-url'),
                         ('--find-links', 'find-links'), ('--allow-insecure-host', 'trusted-host')]:
        options += [word for value in settings.get(name, '').split() for word in (option, value)]
    options += ['--no-index'] if settings.get('no-index', 'false').lower() in ('1', 'true', 'yes', 'on') else []
    timeout = settings.get('timeout') or settings.get('default-timeout')
    if timeout:
        env.setdefault('UV_HTTP_TIMEOUT', timeout)
    if settings.get('proxy'):
        env.update(dict.fromkeys(('HTTPS_PROXY', 'HTTP_PROXY', 'ALL_PROXY'), settings['proxy']))
    if settings.get('client-cert'):
        env['SSL_CLIENT_CERT'] = settings['client-cert']
    # the variables of requests, which pip uses, override pip's setting (requests issue 3829; tested with pip 26.3)
    cert = env.get('REQUESTS_CA_BUNDLE') or env.get('CURL_CA_BUNDLE') or settings.get('cert')
    if cert:
        env['SSL_CERT_DIR' if os.path.isdir(cert) else 'SSL_CERT_FILE'] = cert
    elif not env.get('SSL_CERT_FILE'):
        # the system knows a centre's own certificate authority; UV_NATIVE_TLS is the older name of UV_SYSTEM_CERTS
        env.setdefault('UV_SYSTEM_CERTS', '1')
        env.setdefault('UV_NATIVE_TLS', '1')
    return options, env


def problem_of(output: str, problems: Any) -> Any:
    """The first of these problems, (regex, remedy), whose regex matches an output; ('', '') if none does."""
    return next((problem for problem in problems if re.search(problem[0], output)), ('', ''))


def uv_compile(uv: str, target: Target, settings: Settings, index_urls: List[str], *words: str, text: str = '') -> Any:
    """Run 'uv pip compile' for a Target with pip's settings, more arguments and an input; the CompletedProcess."""
    glibc, machine = PLATFORM_REGEX.match(target.platform).groups()  # type: ignore
    known = [number for number in UV_GLIBCS if number <= int(glibc)] or UV_GLIBCS[:1]
    options, env = uv_settings(settings, index_urls)
    command = [uv, 'pip', 'compile', '--no-header', '--only-binary', ':all:', '--no-progress', '--python',
               sys.executable, '--python-version', target.python, '--python-platform',
               '%s-manylinux_2_%d' % (machine, known[-1])]
    return subprocess.run(command + options + list(words), input=text, env=env, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, universal_newlines=True)


def resolve_with_uv(uv: str, wanted: Any, index_urls: List[str], target: Target, settings: Settings, say: Say) -> Any:
    """List of Package, as uv chooses them, for all requirements, with the hash of the wheel for the target.

    If an index does not answer, it is removed from pip's settings, or raises RuntimeError if it is the easyconfig's.
    """
    while True:
        done = uv_compile(uv, target, settings, index_urls, '--no-annotate', '--emit-index-annotation',
                          '--generate-hashes', '-', text='\n'.join(wanted) + '\n')
        if done.returncode == 0:
            # in this format, uv names the file that it would install, also from a flat page (seen with uv 0.13.9)
            pylock = uv_compile(uv, target, settings, index_urls, '--format', 'pylock.toml', '-',
                                text='\n'.join(wanted) + '\n').stdout
            return packages_of_uv(done.stdout, pylock, index_urls, settings.get('find-links', '').split())
        # lines are complete: uv does not wrap them
        url = re.search(r'Failed to fetch: `?(\S+?)`?$', done.stderr, re.M)
        reason = (re.findall(r'(?:cause|Caused by): (.*)', done.stderr) or [''])[-1]
        failed = [address for address in index_urls if url and url.group(1).startswith(address)]
        if failed:
            # without this index, uv might use another one's package of that name
            raise RuntimeError("The package index of the easyconfig did not answer: %s: %s. Nothing was written. Run "
                               "this on a machine that reaches the index, or use a proxy ($https_proxy)"
                               % (url.group(1), reason))  # type: ignore
        extra = settings.get('extra-index-url', '').split()
        failed = [address for address in extra if url and url.group(1).startswith(hide_login(address))]
        if not failed:
            lines = [line for line in done.stderr.splitlines() if not line.startswith('Using ')]
            raise RuntimeError("uv failed for Python %s on %s:\n%s\n%s" % (
                target.python, target.platform, '\n'.join(lines).strip(), problem_of(done.stderr, REMEDIES)[1]))
        # pip would also continue without it
        say("skipping an index that does not answer: %s (%s)" % (hide_login(failed[0]), reason))
        settings['extra-index-url'] = ' '.join(address for address in extra if address != failed[0])


def hide_login(address: str) -> str:
    """An address without user and password."""
    return re.sub(r'//[^/@]*@', '//', address)


def wheel_version(address: str) -> Any:
    """Version in the address of a wheel (PEP 427); '' for any other file."""
    name = urllib.parse.unquote(os.path.basename(urllib.parse.urlsplit(address).path))
    return name.split('-')[1] if re.match(r'[^-]+-[^-]+-.*\.whl$', name) else ''


def packages_of_uv(output: str, pylock: str, index_urls: List[str], pages: Any) -> Any:
    """List of Package in the output of 'uv pip compile'; RuntimeError if one has no hash, or is from elsewhere.

    :param pylock: the same in the form of PEP 751
    :param pages: --find-links of pip's settings
    """
    packages, indexes = [], set()
    for entry in re.split(r'\n(?=\S)', output.strip()):
        found = re.match(r'([\w.-]+)(?:==| @ )(\S+)', entry)
        address = found.group(2).partition('#')[0] if found and ' @ ' in found.group() else ''
        version = wheel_version(address) if address else found and found.group(2)
        if not version:
            raise RuntimeError("'%s' has no version: only packages of an index and wheels with an address can be "
                               "locked" % entry.splitlines()[0])
        name = found.group(1)  # type: ignore
        index = (re.findall(r'# from (\S+)', entry) or [''])[0]
        # uv computes hashes that an index does not give, and writes them only to its text
        hashes = [digest for part in pylock.split('[[packages]]') if 'name = "%s"' % normalised(name) in part
                  for digest in re.findall(r'sha256 = "(\w+)"', part)] or re.findall(r'--hash=sha256:(\w+)', entry)
        if not hashes:
            raise RuntimeError("The index gives no sha256 for %s %s (%s)" % (name, version, index))
        if not address and index in [hide_login(page) for page in pages]:
            address = index
        known = address or index.rstrip('/') in [url.rstrip('/') for url in index_urls]
        if '+' in version and index_urls and not known:
            raise RuntimeError("%s %s is not on the package index of the easyconfig (%s), but on %s. Nothing was "
                               "written. If that index is right, add it to index_urls"
                               % (name, version, ', '.join(index_urls), index or 'another one'))
        indexes.add(index.rstrip('/'))
        packages.append(Package(normalised(name), version, tuple(hashes), address))
    unused = [address for address in index_urls if address.rstrip('/') not in indexes]
    if unused:
        # its address may be wrong, or a login page
        raise RuntimeError("The package index %s has none of these packages: is its address right? Nothing was "
                           "written. If the index is not needed, remove it from index_urls" % unused[0])
    return packages


def sha256(path: str) -> str:
    """sha256 of a file."""
    digest = hashlib.sha256()
    with open(path, 'rb') as stream:
        for block in iter(lambda: stream.read(1 << 20), b''):
            digest.update(block)
    return digest.hexdigest()


def marker(targets: Any, among: Any) -> str:
    """The marker of a requirement that is for some of all targets; empty if it is for all of them."""
    pythons, platforms = {target.python for target in among}, {target.platform for target in among}
    # leave out conditions that do not matter
    by_python = any(Target(python, target.platform) not in targets for target in targets for python in pythons)
    by_machine = any(Target(target.python, name) not in targets for target in targets for name in platforms)
    parts = collections.OrderedDict.fromkeys(' and '.join(
        ["platform_machine == '%s'" % PLATFORM_REGEX.match(target.platform).group(2)] * by_machine
        + ["python_version == '%s'" % target.python] * by_python) for target in targets)
    return ' ; ' + ' or '.join(parts) if by_python or by_machine else ''


def lock_text(file_name: str, recipe: Recipe, found: Any) -> str:
    """Text of a lock file, from {Target: list of Package}. PythonVenv compares its head (read_head()) with the
    easyconfig, Python and machine."""
    head = ["# Lock file of %s, made by 'slingtorch lock %s': do not edit it, run that again." % (file_name, file_name),
            "# Form: pip's requirements file for 'pip install --require-hashes'.",
            '# python: ' + ' '.join(collections.OrderedDict.fromkeys(target.python for target in found)),
            '# platform: ' + ' '.join(collections.OrderedDict.fromkeys(target.platform for target in found))]
    head += ['# wanted: ' + requirement for requirement in recipe['wanted']] + ['']
    head += ['--extra-index-url ' + address for address in recipe['index_urls'] + recipe.get('more_urls', [])]
    # not directories, which exist only on this machine; pip treats the address of a wheel as a page with one link
    head += ['--find-links ' + link for link in sorted({
        package.link for chosen in found.values() for package in chosen}) if link.startswith('http')]
    head += ['--only-binary :all:', '']
    packages: Dict[Any, Any] = {}
    for target, chosen in found.items():
        for package in chosen:
            targets, hashes = packages.setdefault((package.name, package.version), ([], set()))
            targets.append(target)
            hashes.update(package.hashes)
    for (name, version), (targets, hashes) in sorted(packages.items()):
        head += ['%s==%s%s \\' % (name, version, marker(targets, list(found))),
                 ' \\\n'.join('    --hash=sha256:' + digest for digest in sorted(hashes))]
    return '\n'.join(head) + '\n'


def read_head(text: str) -> Any:
    """Pythons, platforms and packages (lists) in the head of a lock file; empty lists without such a head."""
    pythons, platforms, wanted = [re.findall('^# %s: (.*)$' % key, text, re.M)
                                  for key in ('python', 'platform', 'wanted')]
    return ' '.join(pythons).split(), ' '.join(platforms).split(), wanted


def machine_at_hand() -> Any:
    """Name of this machine's C library, minor version of a glibc (else None), and processor."""
    libc = os.confstr('CS_GNU_LIBC_VERSION') or ''
    minor = re.match(r'glibc 2\.(\d+)', libc)
    return libc or 'another C library', int(minor.group(1)) if minor else None, os.uname().machine


def lock(recipe: Recipe, file_name: str, lock_file: str, python: str, say: Say,
         settings: Optional[Settings] = None) -> None:
    """Write a lock file; RuntimeError if the packages cannot be found.

    :param recipe: what the easyconfig specifies: see check_recipe(). May also have links (for --find-links) and
        more_urls (indexes that may fail to answer), in addition to those of pip's configuration
    :param python: the Python whose pip configuration to use
    :param settings: that configuration, if known: pip takes half a second to list it
    """
    check_recipe(recipe, file_name)
    settings = dict(pip_settings(python) if settings is None else settings)
    # a project's own wheels are beside the lock file ('slingtorch new')
    beside = os.path.dirname(os.path.abspath(lock_file))
    links = recipe.get('links', []) + [beside] * any(name.endswith('.whl') for name in os.listdir(beside))
    settings['find-links'] = ' '.join([settings.get('find-links', '')] + links)
    settings['extra-index-url'] = ' '.join([settings.get('extra-index-url', '')] + recipe.get('more_urls', []))
    for address in recipe['index_urls']:
        # pip uses http only for these hosts
        host = re.match(r'http://(?:[^/@]*@)?([^/:]+)', address)
        if host and not host.group(1).startswith(('127.', 'localhost')) \
                and host.group(1) not in [name.partition(':')[0] for name in settings.get('trusted-host', '').split()]:
            raise RuntimeError("pip ignores the package index on %s, because its address begins with http: instead of "
                               "https:. Nothing was written. Use its https address, or allow that host in pip's "
                               "configuration (pip config set global.trusted-host %s)" % (host.group(1), host.group(1)))
    uv, found = need_uv(), collections.OrderedDict()
    for platform in recipe['platforms']:
        for version in recipe['python_versions']:
            target = Target(version, platform)
            say("resolving packages for Python %s on %s with uv" % target)
            found[target] = resolve_with_uv(uv, recipe['wanted'], recipe['index_urls'], target, settings, say)
    write_whole({lock_file: lock_text(file_name, recipe, found)})
    say("%s: %d packages" % (lock_file, len({package[:2] for chosen in found.values() for package in chosen})))
