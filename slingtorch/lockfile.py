# SPDX-License-Identifier: GPL-2.0-only
"""
The lock file of an easyconfig of PythonVenv, written and read: for `eb`, which makes one where there is none yet, and
for 'slingtorch lock'.

uv resolves for each Python and platform that the easyconfig names, whatever runs this, from metadata alone, and takes
the hash of the wheel for each from the pages of the indexes.
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
import urllib.request
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

PLATFORM_REGEX = re.compile(r'^manylinux_2_(\d+)_(x86_64|aarch64)$')
# newest glibc of the platforms that uv can be told (uv help pip compile, --python-platform)
UV_GLIBCS = [17, 28] + list(range(31, 41))
PROXY_REGEX = re.compile(r'^((https?|socks\w+)://([^/@]+@)?)?[^/:@]+(:\d+)?/?$')
INDEX_FORM = re.compile(r'^(https?|file)://\S+$')
# variables of uv that say how it works; those that say what it takes are pip's to say (uv_settings())
UV_VARIABLES = ('UV_CACHE_DIR', 'UV_HTTP_TIMEOUT', 'UV_HTTP_CONNECT_TIMEOUT', 'UV_KEYRING_PROVIDER', 'UV_SYSTEM_CERTS',
                'UV_NATIVE_TLS')

# how long asking for the sizes of downloads may take (seconds)
SIZES_TIMEOUT = 15

NOT_FOUND = (
    "No index has it for this Python and platform: compare version, python_versions and wheel_platform of the "
    "easyconfig with the files that the index lists ('pip config list' shows which indexes are asked, besides "
    "index_urls).")
# what uv prints, and what to do then
PROXY_PROBLEM = (
    'InvalidProxyURL|Proxy URL had|Failed to parse: |SOCKS support|[Ii]nvalid proxy',
    "The address of a proxy is not one that can be used: $https_proxy, $http_proxy and $all_proxy ('env | grep -i "
    "proxy' shows them) must have the form http://HOST:PORT. Correct them, or unset them where no proxy is needed.")
REMEDIES = [
    ('Hash mismatch', "An index has answered with another file than its own page announces. Nothing was "
     "written. Try again; if it stays so, do not install that file, and tell those who run the index."),
    PROXY_PROBLEM,
    # uv says 'No solution found' of these as well
    ('conflicting dependencies|are incompatible',
     "The packages do not fit together: change python_packages or extra_packages of the easyconfig."),
    ('No solution found', NOT_FOUND),
    ('Failed to fetch|Request failed|error sending request', "The index does not answer. Run eb --fetch where it does, "
     "if need be through a proxy ($https_proxy): the installation itself needs no network."),
]

Recipe = Dict[str, Any]     # what the easyconfig says: see check_recipe()
Settings = Dict[str, str]   # of pip
Say = Callable[[str], None]
Target = collections.namedtuple('Target', 'python platform')
# link: where a wheel is that is on no index: its own address (NAME @ ADDRESS), or a page as --find-links takes it
Package = collections.namedtuple('Package', 'name version hashes link')


def check_recipe(recipe: Recipe, file_name: str) -> None:
    """Raise RuntimeError if a recipe (lists wanted, index_urls, python_versions, platforms) cannot be locked."""
    pythons, platforms = recipe['python_versions'], recipe['platforms']
    if not pythons or not all(re.match(r'^3\.\d+$', text) for text in pythons):
        raise RuntimeError("%s: python_versions is %r, and must name the Python that the packages are for, such as "
                           "['3.12']" % (file_name, pythons))
    if not platforms or not all(PLATFORM_REGEX.match(str(text)) for text in platforms):
        raise RuntimeError("%s: wheel_platform is %s, and must have the form manylinux_2_28_x86_64 (glibc 2.28 or "
                           "newer), or be a list of such" % (file_name, ', '.join(map(repr, platforms))))
    options = [text for text in recipe['wanted'] if text.startswith('-')]
    if options:
        raise RuntimeError("%s: %s is an option and no package. Indexes belong in index_urls" % (file_name, options[0]))
    for address in recipe['index_urls'] + [text.partition('@')[2].strip() for text in recipe['wanted']]:
        if '@' in address.partition('://')[2].partition('/')[0]:
            raise RuntimeError("%s: there is a user or password in an address, which would stand in the lock "
                               "file. Keep it in ~/.netrc, which pip reads" % file_name)
        if address in recipe['index_urls'] and not INDEX_FORM.match(address):
            raise RuntimeError("%s: index_urls has %r, which is not an address (https://...)" % (file_name, address))


def recipe_of(values: Any) -> Recipe:
    """What an easyconfig's parameters say of its packages."""
    platforms = values['wheel_platform']
    return {'wanted': list(values['python_packages']) + list(values['extra_packages']),
            'index_urls': list(values['index_urls']), 'python_versions': list(values['python_versions']),
            'platforms': platforms if isinstance(platforms, list) else [platforms]}


def normalised(name: str) -> str:
    """Name of a package as lock files have it (PEP 503)."""
    return re.sub('[-_.]+', '-', name).lower()


def pinned(wanted: Sequence[str]) -> Dict[str, str]:
    """{name: version} of the packages of which one version alone is wanted."""
    found = [re.match(r'([\w.-]+)==([^\s*;,=]+)$', word) for word in wanted]
    return {match.group(1): match.group(2) for match in found if match}


def wheel_dir(source_path: str, name: str) -> str:
    """Where the wheels of a software are in one of EasyBuild's source paths."""
    return os.path.join(source_path, name.lower()[0], name, 'wheels')


def find_uv() -> Optional[str]:
    """$SLINGTORCH_UV (empty: none), else the uv beside this Python or in $PATH; None if it does not run here."""
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
    """The environment without the user's settings of uv, which must not send packages elsewhere, but for those kept."""
    env = {name: value for name, value in os.environ.items() if not name.startswith('UV_') or name in kept}
    return dict(env, UV_NO_CONFIG='1', UV_PYTHON_DOWNLOADS='never', UV_NO_WRAP='1', NO_COLOR='1')


def pip_settings(python: str, command: str = 'download', flags: str = '-s') -> Settings:
    """What the pip of a Python is configured with for a command, by files and variables: {name of an option: value}.

    RuntimeError where pip cannot read its configuration: without it packages would come from elsewhere.
    """
    # with a 'user = true', pip would list the user's own file alone
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
    """The index that the pip of a Python asks where nothing is configured, as its help says; RuntimeError without."""
    said = subprocess.run([python, '-s', '-m', 'pip', '--isolated', 'download', '--help'], stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, universal_newlines=True).stdout
    found = re.search(r'Package\s+Index\s+\(default\s+(https?://[^)\s]+)\)', said)
    if not found:
        raise RuntimeError("%s -m pip does not say which index it asks. Name one: export PIP_INDEX_URL=ADDRESS"
                           % python)
    return found.group(1)


def uv_settings(settings: Settings, index_urls: List[str]) -> Tuple[List[str], Dict[str, str]]:
    """The same for uv, with the index_urls of the easyconfig first: list of options, dictionary of the environment."""
    env = dict(uv_environment(UV_VARIABLES), UV_HTTP_RETRIES='1')
    # as pip does, uv is to compare the versions of all indexes: PyTorch's have old ones of common packages. Of a
    # version that several have, it takes that of the first index (uv help pip compile, --index-strategy)
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
    # those of requests, which pip uses, win over its own (requests issue 3829; tried with pip 26.3)
    cert = env.get('REQUESTS_CA_BUNDLE') or env.get('CURL_CA_BUNDLE') or settings.get('cert')
    if cert:
        env['SSL_CERT_DIR' if os.path.isdir(cert) else 'SSL_CERT_FILE'] = cert
    elif not env.get('SSL_CERT_FILE'):
        # a centre's own authority is known to the system; UV_NATIVE_TLS is the name before UV_SYSTEM_CERTS
        env.setdefault('UV_SYSTEM_CERTS', '1')
        env.setdefault('UV_NATIVE_TLS', '1')
    return options, env


def problem_of(output: str, problems: Any) -> Any:
    """The first of these problems, (words that are printed, what to do), that an output tells of; empty without one."""
    return next((problem for problem in problems if re.search(problem[0], output)), ('', ''))


def no_answer(address: str, reason: Any) -> Any:
    """The error for an index of the easyconfig: without it, another one's package of that name might be taken."""
    proxies = urllib.request.getproxies()
    bad = [value for name, value in proxies.items() if name != 'no' and not PROXY_REGEX.match(value)]
    if bad:
        # uv goes on without a proxy
        reason = "InvalidProxyURL %s. %s" % (bad[0], PROXY_PROBLEM[1])
    return RuntimeError("The package index of the easyconfig did not answer: %s: %s. Nothing was written. Run this "
                        "where it can be reached, if need be through a proxy ($https_proxy)" % (address, reason))


def uv_compile(uv: str, target: Target, settings: Settings, index_urls: List[str], *words: str, text: str = '',
               timeout: Any = None) -> Any:
    """Run 'uv pip compile' for a Target with pip's settings, these words and this input; its CompletedProcess."""
    glibc, machine = PLATFORM_REGEX.match(target.platform).groups()  # type: ignore
    known = [number for number in UV_GLIBCS if number <= int(glibc)] or UV_GLIBCS[:1]
    options, env = uv_settings(settings, index_urls)
    command = [uv, 'pip', 'compile', '--no-header', '--only-binary', ':all:', '--no-progress', '--python',
               sys.executable, '--python-version', target.python, '--python-platform',
               '%s-manylinux_2_%d' % (machine, known[-1])]
    return subprocess.run(command + options + list(words), input=text, env=env, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, universal_newlines=True, timeout=timeout)


def download_sizes(uv: str, names: Any, python_version: str, settings: Settings) -> Any:
    """Files that a lock file without hashes means here, as uv reads pages (PEP 751): {name: bytes, 0 if not said}."""
    minor, machine = machine_at_hand()[1:]
    if not uv or not minor:
        return {}
    target = Target(python_version, 'manylinux_2_%s_%s' % (minor, machine))
    try:
        # from an index that has neither metadata files nor answers for parts of a file, uv would get the whole of it
        done = uv_compile(uv, target, settings, [], '--no-cache', '--no-deps', '--format', 'pylock.toml', names,
                          timeout=SIZES_TIMEOUT)
    except subprocess.TimeoutExpired:
        return {}
    sizes = {}
    for address, rest in re.findall(r'\{ (?:url|path) = "([^"]+\.whl)"(.*?)hashes', done.stdout):
        path = urllib.parse.unquote(address)
        local = path[len('file://'):] if path.startswith('file://') else path
        size = re.search(r'size = (\d+)', rest)
        there = os.path.getsize(local) if os.path.isfile(local) else 0
        sizes[os.path.basename(path)] = int(size.group(1)) if size else there
    return sizes


def resolve_with_uv(uv: str, wanted: Any, index_urls: List[str], target: Target, settings: Settings, say: Say) -> Any:
    """All packages that these need, as uv chooses them, with the hash of the wheel for the target: list of Package.

    An index of pip's settings that does not answer is taken out of them; one of the easyconfig is a RuntimeError.
    """
    while True:
        done = uv_compile(uv, target, settings, index_urls, '--no-annotate', '--emit-index-annotation',
                          '--generate-hashes', '-', text='\n'.join(wanted) + '\n')
        if done.returncode == 0:
            # in that format uv names the file that it would install, also of a flat page (seen with uv 0.13.9)
            pylock = uv_compile(uv, target, settings, index_urls, '--format', 'pylock.toml', '-',
                                text='\n'.join(wanted) + '\n').stdout
            return packages_of_uv(done.stdout, pylock, index_urls, settings.get('find-links', '').split())
        # with all its lines: uv wraps none
        url = re.search(r'Failed to fetch: `?(\S+?)`?$', done.stderr, re.M)
        reason = (re.findall(r'(?:cause|Caused by): (.*)', done.stderr) or [''])[-1]
        failed = [address for address in index_urls if url and url.group(1).startswith(address)]
        if failed:
            raise no_answer(url.group(1), reason)  # type: ignore
        extra = settings.get('extra-index-url', '').split()
        failed = [address for address in extra if url and url.group(1).startswith(hide_login(address))]
        if not failed:
            lines = [line for line in done.stderr.splitlines() if not line.startswith('Using ')]
            raise RuntimeError("uv failed for Python %s on %s:\n%s\n%s" % (
                target.python, target.platform, '\n'.join(lines).strip(), problem_of(done.stderr, REMEDIES)[1]))
        # pip would go on without it as well
        say("left out, since it does not answer: %s (%s)" % (hide_login(failed[0]), reason))
        settings['extra-index-url'] = ' '.join(address for address in extra if address != failed[0])


def hide_login(address: str) -> str:
    """An address without user and password."""
    return re.sub(r'//[^/@]*@', '//', address)


def entries_of_uv(output: str) -> Any:
    """One text for each package that 'uv pip compile' wrote."""
    return re.split(r'\n(?=\S)', output.strip())


def wheel_version(address: str) -> Any:
    """Version in the name of a wheel (PEP 427), by its address; '' for any other file."""
    name = urllib.parse.unquote(os.path.basename(urllib.parse.urlsplit(address).path))
    return name.split('-')[1] if re.match(r'[^-]+-[^-]+-.*\.whl$', name) else ''


def packages_of_uv(output: str, pylock: str, index_urls: List[str], pages: Any) -> Any:
    """List of Package in what 'uv pip compile' wrote; RuntimeError if one has no hash, or is from elsewhere.

    :param pylock: the same in the form of PEP 751
    :param pages: --find-links of pip's settings
    """
    packages, indexes = [], set()
    for entry in entries_of_uv(output):
        found = re.match(r'([\w.-]+)(?:==| @ )(\S+)', entry)
        address = found.group(2).partition('#')[0] if found and ' @ ' in found.group() else ''
        version = wheel_version(address) if address else found and found.group(2)
        if not version:
            raise RuntimeError("'%s' has no version: only packages of an index, and wheels by their address, can be "
                               "locked" % entry.splitlines()[0])
        name = found.group(1)  # type: ignore
        index = (re.findall(r'# from (\S+)', entry) or [''])[0]
        # uv computes those that an index does not give, and has them in its text alone
        hashes = [digest for part in pylock.split('[[packages]]') if 'name = "%s"' % normalised(name) in part
                  for digest in re.findall(r'sha256 = "(\w+)"', part)] or re.findall(r'--hash=sha256:(\w+)', entry)
        if not hashes:
            raise RuntimeError("The index gives no sha256 for %s %s (%s)" % (name, version, index))
        if not address and index in [hide_login(page) for page in pages]:
            address = index
        known = address or index.rstrip('/') in [url.rstrip('/') for url in index_urls]
        if '+' in version and index_urls and not known:
            raise RuntimeError("%s %s is not on the package index of the easyconfig (%s), but on %s. Nothing was "
                               "written. Name that one in index_urls if it is right"
                               % (name, version, ', '.join(index_urls), index or 'another one'))
        indexes.add(index.rstrip('/'))
        packages.append(Package(normalised(name), version, tuple(hashes), address))
    check_indexes_used(index_urls, [address for address in index_urls if address.rstrip('/') in indexes])
    return packages


def check_indexes_used(index_urls: List[str], used: Any) -> None:
    """Raise an error for an index on which nothing was found: a wrong address, or a page to log in."""
    for address in index_urls:
        if address not in used:
            raise RuntimeError("None of these packages was found on the package index %s: is its address right? "
                               "Nothing was written. Take it out of index_urls if it is not needed" % address)


def sha256(path: str) -> str:
    """sha256 of a file."""
    digest = hashlib.sha256()
    with open(path, 'rb') as stream:
        for block in iter(lambda: stream.read(1 << 20), b''):
            digest.update(block)
    return digest.hexdigest()


def marker(targets: Any, among: Any) -> str:
    """For which of all targets a package is: the marker of a requirement, empty for all of them."""
    pythons, platforms = {target.python for target in among}, {target.platform for target in among}
    # what does not matter is left out
    by_python = any(Target(python, target.platform) not in targets for target in targets for python in pythons)
    by_machine = any(Target(target.python, name) not in targets for target in targets for name in platforms)
    parts = collections.OrderedDict.fromkeys(' and '.join(
        ["platform_machine == '%s'" % PLATFORM_REGEX.match(target.platform).group(2)] * by_machine
        + ["python_version == '%s'" % target.python] * by_python) for target in targets)
    return ' ; ' + ' or '.join(parts) if by_python or by_machine else ''


def lock_lines(found: Any) -> Any:
    """Lines of a requirements file with hashes, from {Target: list of Package}."""
    packages: Dict[Any, Any] = {}
    for target, chosen in found.items():
        for package in chosen:
            targets, hashes = packages.setdefault((package.name, package.version), ([], set()))
            targets.append(target)
            hashes.update(package.hashes)
    lines = []
    for (name, version), (targets, hashes) in sorted(packages.items()):
        lines += ['%s==%s%s \\' % (name, version, marker(targets, list(found))),
                  ' \\\n'.join('    --hash=sha256:' + digest for digest in sorted(hashes))]
    return lines


def lock_text(file_name: str, recipe: Recipe, found: Any) -> str:
    """Text of a lock file; read_head() reads what PythonVenv compares with easyconfig, Python and machine."""
    head = ["# Lock file of %s, made by 'slingtorch lock %s': do not edit it, run that again." % (file_name, file_name),
            "# Form: pip's requirements file for 'pip install --require-hashes'.",
            '# python: ' + ' '.join(collections.OrderedDict.fromkeys(target.python for target in found)),
            '# platform: ' + ' '.join(collections.OrderedDict.fromkeys(target.platform for target in found))]
    head += ['# wanted: ' + requirement for requirement in recipe['wanted']] + ['']
    head += ['--extra-index-url ' + address for address in recipe['index_urls'] + recipe.get('more_urls', [])]
    # a directory is on this machine alone; of a wheel's address pip makes a page with one link
    head += ['--find-links ' + link for link in sorted({
        package.link for chosen in found.values() for package in chosen}) if link.startswith('http')]
    head += ['--only-binary :all:', '']
    return '\n'.join(head + lock_lines(found)) + '\n'


def read_head(text: str) -> Any:
    """Pythons, platforms and packages (lists) that a lock file says it is for; empty where it was made otherwise."""
    pythons, platforms, wanted = [re.findall('^# %s: (.*)$' % key, text, re.M)
                                  for key in ('python', 'platform', 'wanted')]
    return ' '.join(pythons).split(), ' '.join(platforms).split(), wanted


def machine_at_hand() -> Any:
    """The C library, as text, the number behind '2.' of a glibc (else None), and the processor of this machine."""
    libc = os.confstr('CS_GNU_LIBC_VERSION') or ''
    minor = re.match(r'glibc 2\.(\d+)', libc)
    return libc or 'another C library', int(minor.group(1)) if minor else None, os.uname().machine


def replace_file(path: str, text: str) -> None:
    """Write a file beside it first: a full disk leaves what was there."""
    try:
        with open(path + '.new', 'w') as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        if os.path.exists(path):
            shutil.copymode(path, path + '.new')
        os.replace(path + '.new', path)
    finally:
        if os.path.exists(path + '.new'):
            os.remove(path + '.new')


def lock(recipe: Recipe, file_name: str, lock_file: str, python: str, say: Say) -> None:
    """Write a lock file; RuntimeError if the packages cannot be had.

    :param recipe: what the easyconfig says: see check_recipe(). Also, besides pip's configuration, links (for
        --find-links) and more_urls (indexes that may fail to answer)
    :param python: the Python whose pip is asked for its configuration
    """
    check_recipe(recipe, file_name)
    settings = pip_settings(python)
    # a project's own wheels lie beside it ('slingtorch new')
    beside = os.path.dirname(os.path.abspath(lock_file))
    links = recipe.get('links', []) + [beside] * any(name.endswith('.whl') for name in os.listdir(beside))
    settings['find-links'] = ' '.join([settings.get('find-links', '')] + links)
    settings['extra-index-url'] = ' '.join([settings.get('extra-index-url', '')] + recipe.get('more_urls', []))
    for address in recipe['index_urls']:
        # pip asks these alone without https
        host = re.match(r'http://(?:[^/@]*@)?([^/:]+)', address)
        if host and not host.group(1).startswith(('127.', 'localhost')) \
                and host.group(1) not in [name.partition(':')[0] for name in settings.get('trusted-host', '').split()]:
            raise RuntimeError("pip leaves out the package index on %s, since its address begins with http: and not "
                               "with https:. Nothing was written. Name its https address, or allow that host in pip's "
                               "configuration (pip config set global.trusted-host %s)" % (host.group(1), host.group(1)))
    uv, found = need_uv(), collections.OrderedDict()
    for platform in recipe['platforms']:
        for version in recipe['python_versions']:
            target = Target(version, platform)
            say("uv chooses packages for Python %s on %s" % target)
            found[target] = resolve_with_uv(uv, recipe['wanted'], recipe['index_urls'], target, settings, say)
    replace_file(lock_file, lock_text(file_name, recipe, found))
    say("%s: %d packages" % (lock_file, len({package[:2] for chosen in found.values() for package in chosen})))
