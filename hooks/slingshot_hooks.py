##
# Copyright 2026 the slingtorch authors
#
# This file is part of slingtorch, an EasyBuild bundle, and is distributed under
# the GNU General Public License version 2 (see the file LICENSE).
##
"""
EasyBuild hooks of slingtorch: they add the values of the site that this machine is, refuse what is for another one, and
mend locks of killed runs.

The hook functions at the end only look up the name of the software in the dictionaries above them. Sites are data, in
sites/*.cfg (see docs/sites.md); nothing in this file knows one by name.

A callable in this file must not have a name that ends in '_hook' unless it is a hook of EasyBuild.
"""
import json
import os
import pwd
import shutil
import socket
import sys
import time

from easybuild.framework.easyconfig.easyconfig import get_easyblock_class
from easybuild.tools.build_log import EasyBuildError, print_msg, print_warning
from easybuild.tools.config import build_option
from easybuild.tools.filetools import det_lock_path

# EasyBuild loads this file by its path: what lies beside it is not importable without this
HOOKS_DIR = os.path.dirname(os.path.realpath(__file__))
if HOOKS_DIR not in sys.path:
    sys.path.insert(0, HOOKS_DIR)

import slingshot_sites  # noqa: E402  pylint: disable=wrong-import-position

# name of the file in the lock of an installation that says who holds it
OWNER_FILE = 'owner.json'
# how long a lock may lack that file because its owner has only just made it (seconds)
OWNER_GRACE = 3

# the Choice of the site, made once per run; what was already printed in this run
_CHOICE = []
_PRINTED = set()


# ----------------------------------------------------------------------------------------------------------------------
# the site

def chosen_site():
    """
    Return the site, as a slingshot_sites.Site.

    It is chosen once per run: modules that are loaded during an installation must not change it.
    """
    if not _CHOICE:
        try:
            choice = slingshot_sites.choose()
            # a wrong name must not wait until the first PyTorch
            choice.site.check_groups(slingshot_sites.chosen_groups())
        except slingshot_sites.SiteError as err:
            raise EasyBuildError("slingtorch: %s", err)
        if choice.warning:
            print_warning("slingtorch: %s", choice.warning, silent=build_option('silent'))
        _CHOICE.append(choice)
    return _CHOICE[0].site


def check_name(ec, name):
    """Guard of a function that is for one software: raise an error if it was called for another."""
    if ec.name != name:
        raise EasyBuildError("Function of slingtorch's hooks for %s was called for %s: correct the tables in %s",
                             name, ec.name, __file__)


def easyblock_names(ec):
    """Names of the easyblock's class and of those it is derived from."""
    easyblock_class = get_easyblock_class(ec.easyblock, name=ec.name)
    return [cls.__name__ for cls in easyblock_class.__mro__]


def wanted_groups(ec, site):
    """Names of the opt-in groups: those of the environment and those of the easyconfig parameter site_groups."""
    groups = slingshot_sites.chosen_groups()
    if 'site_groups' in ec:
        of_easyconfig = ec['site_groups'] or []
        if not isinstance(of_easyconfig, (list, tuple)):
            raise EasyBuildError("Easyconfig parameter site_groups in %s is not a list: write site_groups = ['%s']",
                                 ec.path, of_easyconfig)
        site.check_groups(of_easyconfig, asked_by="Easyconfig parameter site_groups in %s" % ec.path)
        groups.extend(group for group in of_easyconfig if group not in groups)
    return groups


def applies(value, ec, easyblocks):
    """Whether a value of the site is for this easyblock, and for what the easyconfig says."""
    if value.easyblocks and not set(value.easyblocks).intersection(easyblocks):
        return False
    if value.when:
        parameter, wanted = value.when
        return parameter in ec and str(ec[parameter]) == wanted
    return True


def add_site_values(ec):
    """
    Add the site's values to an easyconfig; what the easyconfig says itself stays.

    Environment values become entries of modextravars, with pushenv: unloading the module then gives the user's own
    value back. Other values become the easyconfig parameter of their name, if the easyblock knows it. The name of the
    site becomes the parameter site_name.

    :return: names of the variables and parameters that were added
    """
    site = chosen_site()
    try:
        groups = wanted_groups(ec, site)
        env_values = site.env_values(groups)
        parameter_values = site.parameter_values(groups)
    except slingshot_sites.SiteError as err:
        raise EasyBuildError("slingtorch: %s", err)

    added = []
    easyblocks = easyblock_names(ec)
    said = ec.parser.get_config_dict(validate=False)
    if 'site_name' in ec and 'site_name' not in said:
        # lets an easyblock refuse an easyconfig that is for another site
        ec['site_name'] = site.name
    for name, value in parameter_values.items():
        if name in said:
            ec.log.info("slingtorch: parameter %s of site %s is left out: the easyconfig gives it", name, site.name)
        elif name in ec and applies(value, ec, easyblocks):
            ec[name] = list(value.value) if isinstance(value.value, list) else value.value
            added.append(name)

    # a new dictionary: the present one may be shared with other easyconfigs as the default
    modextravars = dict(ec['modextravars'])
    for name, value in env_values.items():
        if name in modextravars:
            ec.log.info("slingtorch: variable %s of site %s is left out: the easyconfig gives it", name, site.name)
        elif applies(value, ec, easyblocks):
            modextravars[name] = {'value': value.value, 'pushenv': True}
            added.append(name)
    if added:
        ec['modextravars'] = modextravars
        report_site_values(ec, site, groups, added)
    return added


def report_site_values(ec, site, groups, added):
    """Say what was added: in the log each time, on the screen once per software and run."""
    # the name of the module is not known yet when an easyconfig is parsed
    what = os.path.basename(ec.path) if ec.path else ec.name
    msg = "slingtorch: site %s: %s: %d site values (%s)" % (site.name, what, len(added), ', '.join(added))
    for name in groups:
        msg += "; group %s, which needs: %s" % (name, site.groups[name].needs)
    ec.log.info(msg)
    if msg not in _PRINTED:
        _PRINTED.add(msg)
        print_msg(msg, silent=build_option('silent'))


def parse_hook_pytorch_site_values(ec, *args, **kwargs):
    """
    Add the site's values for NCCL or RCCL, libfabric and MPI to PyTorch.

    Without them PyTorch runs over TCP, or hangs: a table of these variables and of what sites set is in
    https://github.com/HewlettPackard/shs-ccl-docs and in the site files, each with its source.
    """
    check_name(ec, 'PyTorch')
    return add_site_values(ec)


def site_meant(ec):
    """
    Name of the one site that an easyconfig is for, or None.

    It says so with the parameter only_site, or in its versionsuffix: '-derecho', '-derecho-cray-mpich'. Only sites that
    are one system count, which can be detected: 'local' and 'slurm' are any machine.
    """
    if 'only_site' in ec and ec['only_site']:
        return ec['only_site']
    words = ec['versionsuffix'].split('-')
    if len(words) < 2:
        return None
    try:
        sites = slingshot_sites.load_all()
    except slingshot_sites.SiteError as err:
        raise EasyBuildError("slingtorch: %s", err)
    return next((site.name for site in sites if site.rules and site.name in words), None)


def refuse_other_site(self):
    """
    Refuse to install what is for another site: what follows would end in modules that are missing.

    Every software is looked at: with --robot the first one of a stack is not PyTorch.
    """
    meant = None if self.dry_run else site_meant(self.cfg)
    if meant is None:
        return
    here = chosen_site().name
    if meant == here:
        return
    raise EasyBuildError("%s is for the site '%s', and this is the site '%s'. Its modules are not here: take an "
                         "easyconfig of this site ('eb --search %s'), or copy this one and change its dependencies%s. "
                         "If this is '%s' and was not recognised, say so: export %s=%s",
                         os.path.basename(self.cfg.path), meant, here, self.name,
                         ' and only_site' if 'only_site' in self.cfg else ' and versionsuffix', meant,
                         slingshot_sites.SITE_VARIABLE, meant)


# ----------------------------------------------------------------------------------------------------------------------
# locks
#
# EasyBuild 5.4.1 takes a directory as lock (create_lock in easybuild/tools/filetools.py), with nothing in it. A run
# that is killed (kill -9, out of memory, lost node) leaves it, and all later runs stop with "Lock ... already exists".

def process_start_time(pid):
    """Start time of a process in clock ticks after boot, as a string; None if it is gone."""
    try:
        with open('/proc/%d/stat' % pid) as fp:
            # the command's name is in parentheses and may hold anything: what follows starts with field 3
            fields = fp.read().rpartition(')')[2].split()
    except (IOError, OSError):
        return None
    return None if fields[0] in 'ZX' else fields[22 - 3]


def first_line(path):
    """First line of a file, or an empty string if there is no such file."""
    try:
        with open(path) as fp:
            return fp.readline().strip()
    except (IOError, OSError):
        return ''


def this_process():
    """What identifies this process: host, boot of the host, name space of process numbers, number, start time."""
    pid = os.getpid()
    try:
        pid_namespace = os.readlink('/proc/self/ns/pid')
    except OSError:
        pid_namespace = ''
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        user = 'user %d' % os.getuid()
    return {
        'host': socket.gethostname(),
        'boot': first_line('/proc/sys/kernel/random/boot_id'),
        'pid_namespace': pid_namespace,
        'pid': pid,
        'start': process_start_time(pid),
        'user': user,
        'since': time.strftime('%Y-%m-%d %H:%M:%S %Z'),
    }


def read_owner(lock_path):
    """Content of the file that says who holds a lock; None if it is not there or not whole."""
    try:
        with open(os.path.join(lock_path, OWNER_FILE)) as fp:
            owner = json.load(fp)
        owner['pid'] = int(owner['pid'])
        return owner if all(key in owner for key in ('host', 'boot', 'pid_namespace', 'start')) else None
    except (IOError, OSError, ValueError, KeyError, TypeError):
        return None


def owner_state(owner):
    """Return 'alive', 'dead', or 'unknown' (there is no owner, or one whose processes cannot be seen from here)."""
    here = this_process()
    if owner is None or owner['host'] != here['host']:
        return 'unknown'
    if owner['boot'] != here['boot']:
        return 'dead'
    if owner['pid_namespace'] != here['pid_namespace']:
        return 'unknown'
    return 'alive' if process_start_time(owner['pid']) == owner['start'] else 'dead'


def lock_of(self):
    """Path of the lock of an installation, or None where EasyBuild uses none or nothing may be touched."""
    if self.dry_run or build_option('ignore_locks'):
        return None
    # the name that EasyBlock.run_all_steps (easybuild/framework/easyblock.py) gives it
    return det_lock_path(self.installdir.replace('/', '_'))


def write_lock_owner(self):
    """Say in the lock of this installation who holds it, unless it is said already."""
    lock_path = lock_of(self)
    if lock_path is None or not os.path.isdir(lock_path) or os.path.exists(os.path.join(lock_path, OWNER_FILE)):
        return
    part = os.path.join(lock_path, '.%s.%d' % (OWNER_FILE, os.getpid()))
    try:
        with open(part, 'w') as fp:
            json.dump(this_process(), fp)
        os.rename(part, os.path.join(lock_path, OWNER_FILE))
    except (IOError, OSError) as err:
        self.log.warning("slingtorch: could not say in %s who holds this lock: %s", lock_path, err)


def remove_stale_lock(self, lock_path, owner):
    """Remove the lock of a killed installation; of two runs that find it, only one does."""
    aside = '%s.stale-%s-%d' % (lock_path, socket.gethostname(), os.getpid())
    try:
        os.rename(lock_path, aside)
    except OSError as err:
        if not os.path.exists(lock_path):
            return
        raise EasyBuildError("The lock %s is left over from an installation by %s that was killed, but it cannot be "
                             "removed (%s). Ask its owner to remove that directory.", lock_path, owner['user'], err)
    if read_owner(aside) != owner:
        # between reading and moving, another run has removed the old lock and made its own: give that back
        os.rename(aside, lock_path)
        return
    shutil.rmtree(aside, ignore_errors=True)
    print_msg("slingtorch: an earlier installation of %s was killed (process %d of %s, since %s): its lock is removed "
              "and the installation is done again" % (self.full_mod_name, owner['pid'], owner['user'], owner['since']),
              log=self.log, silent=build_option('silent'))


def check_lock_owner(self):
    """
    Look at the lock of this installation before EasyBuild does: remove that of a killed run, else say who holds it.

    With --wait-on-lock-limit EasyBuild waits for a lock that is held; that is left to it.
    """
    lock_path = lock_of(self)
    if lock_path is None or not os.path.isdir(lock_path):
        return
    owner = read_owner(lock_path)
    deadline = time.time() + OWNER_GRACE
    while owner is None and os.path.isdir(lock_path) and time.time() - os.stat(lock_path).st_mtime < OWNER_GRACE \
            and time.time() < deadline:
        time.sleep(0.2)
        owner = read_owner(lock_path)
    if not os.path.isdir(lock_path):
        return

    state = owner_state(owner)
    if state == 'dead':
        remove_stale_lock(self, lock_path, owner)
    elif build_option('wait_on_lock_limit') != 0:
        self.log.info("slingtorch: lock %s is held by %s: waiting for it is EasyBuild's", lock_path, owner)
    elif state == 'alive':
        raise EasyBuildError("%s is being installed already: by %s, process %d on %s, since %s. Wait until that has "
                             "finished and try again, or let EasyBuild wait: eb --wait-on-lock-limit=3600",
                             self.full_mod_name, owner['user'], owner['pid'], owner['host'], owner['since'])
    else:
        try:
            age = "made %d minutes ago" % ((time.time() - os.stat(lock_path).st_mtime) // 60)
        except OSError:
            return
        who = "on another host or in another container (%s, process %d of %s, since %s)" % (
            owner['host'], owner['pid'], owner['user'], owner['since']) if owner else "by a run that left no name"
        raise EasyBuildError("%s is locked %s; the lock is %s, %s. If that run is alive, wait until it has finished "
                             "(eb --wait-on-lock-limit=3600). Only if you are sure that it is not: remove that "
                             "directory, or use eb --ignore-locks.", self.full_mod_name, who, lock_path, age)


# ----------------------------------------------------------------------------------------------------------------------
# which software, or which easyblock whatever it installs: function

PARSE_HOOKS = {
    'PyTorch': parse_hook_pytorch_site_values,
}

PRE_EASYBLOCK_HOOKS = {
    'Horovod': check_lock_owner,
    'NCCL': check_lock_owner,
    'PyTorch': check_lock_owner,
    'Singularity': check_lock_owner,
    'aws-ofi-nccl': check_lock_owner,
    'aws-ofi-rccl': check_lock_owner,
}

# fetch is the first step; ready is the first one with --module-only and --skip
PRE_FETCH_HOOKS = {name: write_lock_owner for name in PRE_EASYBLOCK_HOOKS}
PRE_READY_HOOKS = dict(PRE_FETCH_HOOKS)


# ----------------------------------------------------------------------------------------------------------------------
# the hooks of EasyBuild

def call_function_of(table, easyblock, *args, **kwargs):
    """Run the function that a table has for the software that is installed, else for its easyblock."""
    function = table.get(easyblock.name) or table.get(type(easyblock).__name__)
    if function:
        function(easyblock, *args, **kwargs)


def parse_hook(ec, *args, **kwargs):
    """Run for every easyconfig that is parsed."""
    if ec.name in PARSE_HOOKS:
        PARSE_HOOKS[ec.name](ec, *args, **kwargs)


def pre_easyblock_hook(self, *args, **kwargs):
    """Run before an installation, and before EasyBuild looks at its lock."""
    refuse_other_site(self)
    call_function_of(PRE_EASYBLOCK_HOOKS, self, *args, **kwargs)


def pre_fetch_hook(self, *args, **kwargs):
    """Run before the fetch step."""
    call_function_of(PRE_FETCH_HOOKS, self, *args, **kwargs)


def pre_ready_hook(self, *args, **kwargs):
    """Run before the ready step."""
    call_function_of(PRE_READY_HOOKS, self, *args, **kwargs)
