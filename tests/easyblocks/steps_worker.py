# SPDX-License-Identifier: GPL-2.0-only
"""
Takes easyconfigs through EasyBuild's steps up to configure, in one process: eb itself needs seconds for each.

Standard input: one JSON object a line, {"easyconfig": path, "environ": {...}, "options": [...], "last": step}.
Standard output: one line for each, {"error": text or null, "environ": {...}, "opts": text, "preset": text}.
"""
import copy
import json
import os
import sys
import tempfile

from easybuild.framework.easyblock import get_easyblock_instance
from easybuild.framework.easyconfig import easyconfig
from easybuild.tools import hooks
from easybuild.tools.build_log import EasyBuildError, stop_logging
from easybuild.tools.config import Singleton
from easybuild.tools.filetools import change_dir
from easybuild.tools.options import set_up_configuration
from easybuild.tools.run import RunShellCmdError
from easybuild.tools.toolchain import utilities


def configure(job):
    """Run the steps for one easyconfig. What `module show` said is kept: it goes by $MODULEPATH."""
    Singleton._instances.clear()
    utilities._initial_toolchain_instances.clear()
    easyconfig._easyconfigs_cache.clear()
    easyconfig._easyconfig_files_cache.clear()
    hooks._cached_hooks.clear()
    tempfile.tempdir = None
    logfile = set_up_configuration(args=job['options'], silent=True)[1][2]
    error, opts, preset, app = None, '', '', None
    try:
        app = get_easyblock_instance(easyconfig.process_easyconfig(job['easyconfig'])[0])
        app.check_readiness_step()
        app.fetch_step()
        app.checksum_step()
        if job['last'] == 'configure':
            app.cfg.parallel = 2
            app.make_builddir()
            change_dir(app.builddir)
            app.extract_step()
            app.guess_start_dir()
            app.patch_step()
            app.prepare_step()
            app.configure_step()
            opts = app.cfg['preinstallopts']
            if os.path.exists(os.path.join(app.builddir, 'preset.cmake')):
                with open(os.path.join(app.builddir, 'preset.cmake')) as handle:
                    preset = handle.read()
    except (EasyBuildError, RunShellCmdError) as err:
        error = '%s %s' % (err, getattr(err, 'cmd', ''))
    # else every line of the jobs that follow is written to this one's logs as well
    if app:
        app.close_log()
    stop_logging(logfile)
    return {'error': error, 'environ': dict(os.environ), 'opts': opts, 'preset': preset}


def main():
    """Answer every line."""
    answers, sys.stdout = sys.stdout, sys.stderr
    environ, cwd = copy.deepcopy(dict(os.environ)), os.getcwd()
    for line in sys.stdin:
        job = json.loads(line)
        os.environ.update({key: value for key, value in job['environ'].items()})
        answer = configure(job)
        os.environ.clear()
        os.environ.update(environ)
        os.chdir(cwd)
        answers.write(json.dumps(answer) + '\n')
        answers.flush()


if __name__ == '__main__':
    main()
