# SPDX-License-Identifier: GPL-2.0-only
"""
'slingtorch lock': writes the lock file of an easyconfig of PythonVenv.

pip resolves, for the Python and the platform that the easyconfig names, and not for those that run this; the wheels are
downloaded to where eb looks for them, and what was downloaded is what the hashes in the lock file are of.
"""
import collections
import glob
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile

# pip's options --python-version and --platform choose wheels, but markers such as python_version < "3.12" are evaluated
# for the Python that runs pip (https://github.com/pypa/pip/issues/11198). pip's report repeats what was used.
PIP = """
import json, sys
from pip._vendor.packaging import markers
own, target = markers.default_environment, json.loads(sys.argv.pop(1))
markers.default_environment = lambda: dict(own(), **target)
from pip._internal.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
PLATFORM_REGEX = re.compile(r'^manylinux_2_(\d+)_(x86_64|aarch64)$')
# what pip prints with -vv for a page that it does without; that a package is not on an index (404; 403 on PyTorch's) is
# how it is with several indexes
FAILED_PAGE_REGEX = re.compile(r'Could not fetch URL (\S+): (?!40[34] )(.*) - skipping')
NOT_TRUSTED_REGEX = re.compile(r'The repository located at (\S+) is not a trusted')
INDEX_FORM = re.compile(r'^(https?|file)://\S+$')

Wheel = collections.namedtuple('Wheel', 'name version sha256 url')


def find_easyconfig(name, root):
    """
    Path of an easyconfig: a file, or the name of one of the bundle's.

    :param root: directory of the bundle
    :raises RuntimeError: if there is none
    """
    if os.path.isfile(name):
        return os.path.abspath(name)
    found = glob.glob(os.path.join(glob.escape(root), 'easyconfigs', '*', '*', glob.escape(os.path.basename(name))))
    if os.path.dirname(name) or not found:
        raise RuntimeError("There is no easyconfig %s: name a file, or one of the bundle's ('eb --search' finds them)"
                           % name)
    return found[0]


def read_easyconfig(path):
    """
    What an easyconfig says about its packages.

    :return: dictionary of name, lock_file (path beside the easyconfig), wanted, index_urls, python_versions (lists),
             and wheel_platform
    :raises RuntimeError: if it is not an easyconfig of PythonVenv that names packages
    """
    from easybuild.framework.easyconfig.easyconfig import resolve_template
    from easybuild.framework.easyconfig.parser import EasyConfigParser
    from easybuild.tools.build_log import EasyBuildError
    from easybuild.tools.config import init_build_options
    file_name = os.path.basename(path)
    try:
        init_build_options()
        params = EasyConfigParser(path).get_config_dict()
        strings = {key: value for key, value in params.items() if isinstance(value, str)}
        strings.update(versionsuffix=strings.get('versionsuffix', ''), namelower=strings['name'].lower())

        def texts(key, default=()):
            values = resolve_template(params.get(key, default), strings)
            if not isinstance(values, (list, tuple)) or not all(isinstance(value, str) for value in values):
                raise RuntimeError("%s: %s is %r, and must be a list of strings" % (file_name, key, values))
            return list(values)

        wanted = texts('python_packages') + texts('extra_packages')
        found = {'name': params['name'], 'wanted': wanted, 'index_urls': texts('index_urls'),
                 'python_versions': texts('python_versions'), 'sources': texts('sources'),
                 'wheel_platform': params.get('wheel_platform', 'manylinux_2_28_x86_64')}
        if not found['name']:
            raise KeyError('name')
    except (EasyBuildError, KeyError, UnicodeDecodeError) as err:
        raise RuntimeError("%s cannot be read as an easyconfig: %s" % (path, err))
    if params.get('easyblock') != 'PythonVenv' or not wanted:
        raise RuntimeError("%s names no packages to lock: 'slingtorch lock' is for easyconfigs with easyblock = "
                           "'PythonVenv' and a list python_packages" % file_name)
    if not found['sources'] or '%(' in found['sources'][0]:
        raise RuntimeError("%s: the first of 'sources' must be the name of the lock file, such as "
                           "'%%(name)s-%%(version)s%%(versionsuffix)s.lock'" % file_name)
    if not found['python_versions'] or not all(re.match(r'^3\.\d+$', text) for text in found['python_versions']):
        raise RuntimeError("%s: python_versions is %r, and must name the Python that the packages are for, such as "
                           "['3.12']" % (file_name, found['python_versions']))
    if not PLATFORM_REGEX.match(str(found['wheel_platform'])):
        raise RuntimeError("%s: wheel_platform is %r, and must have the form manylinux_2_28_x86_64 (glibc 2.28 or "
                           "newer)" % (file_name, found['wheel_platform']))
    options = [text for text in wanted if text.startswith('-')]
    if options:
        raise RuntimeError("%s: %s is an option of pip, and no package. Indexes belong in index_urls"
                           % (file_name, options[0]))
    lock_file = found['sources'][0]
    if os.path.basename(lock_file) != lock_file or lock_file == file_name:
        raise RuntimeError("%s: the first of 'sources' is %r, and must be the name of a lock file that lies beside the "
                           "easyconfig" % (file_name, lock_file))
    for address in found['index_urls']:
        if '@' in address.partition('://')[2].partition('/')[0]:
            raise RuntimeError("%s: index_urls has a user or password in an address, which would stand in the lock "
                               "file. Keep it in ~/.netrc, which pip reads" % file_name)
        if not INDEX_FORM.match(address):
            raise RuntimeError("%s: index_urls has %r, which is no address of a package index (https://...)"
                               % (file_name, address))
    found['lock_file'] = os.path.join(os.path.dirname(path), found['sources'][0])
    return found


def target_options(python, platform):
    """
    Options with which pip takes wheels for another Python and platform.

    :param python: such as '3.12'
    :param platform: such as 'manylinux_2_28_x86_64'; older ones are named one by one, since pip adds none
    """
    newest, machine = PLATFORM_REGEX.match(platform).groups()
    tags = ['manylinux_2_%d_%s' % (minor, machine) for minor in range(int(newest), 4, -1)]
    # 2.2 of PyTorch's wheels for ROCm says no more than linux
    tags += ['manylinux%s_%s' % (year, machine) for year in ('2014', '2010', '1')] + ['linux_' + machine]
    options = ['--only-binary', ':all:', '--implementation', 'cp', '--python-version', python]
    return options + [word for tag in tags for word in ('--platform', tag)]


def run_pip(args, python, platform):
    """
    Run pip as if it were on that Python and platform.

    :return: what it printed, both streams, and an error to be raised, or None if pip succeeded
    """
    target = {'python_version': python, 'python_full_version': python + '.0', 'sys_platform': 'linux',
              'platform_system': 'Linux', 'platform_machine': PLATFORM_REGEX.match(platform).group(2),
              'os_name': 'posix', 'implementation_name': 'cpython', 'platform_python_implementation': 'CPython'}
    command = [sys.executable, '-s', '-c', PIP, json.dumps(target)] + args + target_options(python, platform)
    # a 'user = true' in somebody's pip.conf contradicts --target
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                          universal_newlines=True, env=dict(os.environ, PIP_USER='0'))
    error = None
    if done.returncode:
        # with -vv a traceback follows
        lines = done.stdout.partition('Exception information:')[0]
        # of a traceback its last line is enough
        lines = re.sub(r'(?s)\nTraceback .*?\n(?=\w+\.)', '\n', lines).strip().splitlines()
        first = next((number for number, line in enumerate(lines) if line.startswith('ERROR')), -12)
        error = RuntimeError("pip (of %s) failed for Python %s on %s:\n%s\n%s" % (
            sys.executable, python, platform, '\n'.join(lines[first:]), remedy(done.stdout)))
    return done.stdout, error


def remedy(output):
    """What to do when pip has said this."""
    if 'HASHES' in output:
        return ("An index has answered with another file than its own page announces. Nothing was written. Try again; "
                "if it stays so, do not install that file, and tell those who run the index.")
    if re.search('InvalidProxyURL|Proxy URL had|Failed to parse: |SOCKS support', output):
        return ("The address of a proxy is not one that pip can use: $https_proxy, $http_proxy and $all_proxy must "
                "have the form http://HOST:PORT ('env | grep -i proxy' shows them).")
    if 'No matching distribution' in output:
        return ("No index has it for this Python and platform: compare version, python_versions and wheel_platform of "
                "the easyconfig with the files that the index lists ('pip config list' shows which indexes pip asks, "
                "besides index_urls).")
    if 'ResolutionImpossible' in output or 'conflicting dependencies' in output:
        return "The packages do not fit together: change python_packages or extra_packages of the easyconfig."
    if 'No module named pip' in output or 'no such option' in output:
        return "pip 22.3 or newer is needed: %s -m pip install --upgrade pip" % sys.executable
    return ''


def resolve(wanted, index_urls, python, platform, work_dir):
    """
    All packages that these need, as pip chooses them.

    :return: list of Wheel, by name
    :raises RuntimeError: if pip fails, or an index of the easyconfig did not answer
    """
    report_file = os.path.join(work_dir, 'report-%s.json' % python)
    args = ['install', '--dry-run', '--ignore-installed', '--target', os.path.join(work_dir, 'none'), '-vv',
            '--disable-pip-version-check', '--no-input', '--retries', '1', '--report', report_file]
    args += [word for address in index_urls for word in ('--extra-index-url', address)]
    output, error = run_pip(args + wanted, python, platform)
    # pip goes on without such an index, and might take a package of the same name from elsewhere
    for host in NOT_TRUSTED_REGEX.findall(output):
        raise RuntimeError("pip leaves out the package index on %s, since its address begins with http: and not with "
                           "https:. Nothing was written. Name its https address, or allow that host in pip's "
                           "configuration (pip config set global.trusted-host %s)" % (host, host))
    for url, reason in FAILED_PAGE_REGEX.findall(output):
        if url.startswith(tuple(index_urls)):
            raise RuntimeError("The package index of the easyconfig did not answer: %s: %s. Nothing was written. Run "
                               "this where it can be reached, if need be through a proxy ($https_proxy)"
                               % (url, reason.strip()))
    if error:
        raise error
    # such as a wrong address, or a page to log in
    for address in index_urls:
        if not re.search(r'\(from %s/' % re.escape(address.rstrip('/')), output):
            raise RuntimeError("None of these packages was found on the package index %s: is its address right? "
                               "Nothing was written. Take it out of index_urls if it is not needed" % address)
    with open(report_file) as stream:
        report = json.load(stream)
    if report['environment']['python_version'] != python:
        raise RuntimeError("pip %s does not let itself be told for which Python it resolves: run slingtorch with "
                           "Python %s" % (report['pip_version'], python))
    wheels = []
    for item in report['install']:
        info = item['download_info']
        archive = info.get('archive_info', {})
        sha256 = archive.get('hashes', {}).get('sha256') or archive.get('hash', '').partition('sha256=')[2]
        name = re.sub('[-_.]+', '-', item['metadata']['name']).lower()
        if not sha256:
            raise RuntimeError("The index gives no sha256 for %s (%s)" % (name, info['url']))
        wheels.append(Wheel(name, item['metadata']['version'], sha256, info['url']))
    return sorted(wheels)


def lock_lines(wheels_by_python):
    """
    Lines of a requirements file with hashes.

    :param wheels_by_python: {version of Python: list of Wheel}
    """
    pythons = list(wheels_by_python)
    packages = collections.OrderedDict()
    for python, wheels in wheels_by_python.items():
        for wheel in wheels:
            packages.setdefault((wheel.name, wheel.version), []).append((python, wheel.sha256))
    lines = []
    for (name, version), found in sorted(packages.items()):
        marker = ''
        if len(found) < len(pythons):
            marker = ' ; ' + ' or '.join("python_version == '%s'" % python for python, _ in found)
        hashes = sorted({sha256 for _, sha256 in found})
        lines.append('%s==%s%s \\' % (name, version, marker))
        lines.append(' \\\n'.join('    --hash=sha256:' + sha256 for sha256 in hashes))
    return lines


def lock_text(file_name, recipe, lines):
    """
    Text of a lock file. PythonVenv compares its head with the easyconfig and with the Python that it uses.

    :param file_name: of the easyconfig
    """
    head = ["# Lock file of %s, made by 'slingtorch lock %s': do not edit it, run that again." % (file_name, file_name),
            "# Form: pip's requirements file for 'pip install --require-hashes'.",
            '# python: ' + ' '.join(recipe['python_versions']),
            '# platform: ' + recipe['wheel_platform']]
    head += ['# wanted: ' + requirement for requirement in recipe['wanted']] + ['']
    head += ['--extra-index-url ' + address for address in recipe['index_urls']] + ['--only-binary :all:', '']
    return '\n'.join(head + lines) + '\n'


def lock(path, store, say):
    """
    Write the lock file of an easyconfig.

    :param path: of the easyconfig
    :param store: function: from the name of the software to the directory for downloaded wheels
    :param say: function that shows a message
    :return: path of the lock file
    """
    recipe = read_easyconfig(path)
    file_name, lock_file, platform = os.path.basename(path), recipe['lock_file'], recipe['wheel_platform']
    if not os.access(os.path.dirname(lock_file), os.W_OK):
        raise RuntimeError("The lock file belongs beside the easyconfig, and %s cannot be written. Copy the easyconfig "
                           "to a directory of yours and name that: slingtorch lock ./%s; eb ./%s"
                           % (os.path.dirname(lock_file), file_name, file_name))
    directory = store(recipe['name'])
    os.makedirs(directory, exist_ok=True)
    work_dir = tempfile.mkdtemp()
    try:
        found = collections.OrderedDict()
        for python in recipe['python_versions']:
            say("pip chooses packages for Python %s on %s" % (python, platform))
            found[python] = resolve(recipe['wanted'], recipe['index_urls'], python, platform, work_dir)
        text = lock_text(file_name, recipe, lock_lines(found))
        draft = os.path.join(work_dir, 'lock')
        with open(draft, 'w') as stream:
            stream.write(text)
        for python, wheels in found.items():
            say("pip downloads %d packages to %s" % (len(wheels), directory))
            args = ['download', '--require-hashes', '--no-deps', '--no-input', '--disable-pip-version-check',
                    '--progress-bar', 'off', '--dest', directory, '--requirement', draft]
            error = run_pip(args, python, platform)[1]
            if error:
                raise error
        # beside it first: a full disk leaves what was there
        shutil.copyfile(draft, lock_file + '.new')
        os.replace(lock_file + '.new', lock_file)
    finally:
        shutil.rmtree(work_dir, ignore_errors=True)
    packages = {(wheel.name, wheel.version) for wheels in found.values() for wheel in wheels}
    say("%s: %d packages" % (lock_file, len(packages)))
    say("now put its checksum into the easyconfig: eb --inject-checksums=sha256 --force %s" % shlex.quote(path))
    return lock_file
