# SPDX-License-Identifier: GPL-2.0-only
"""Run all checks on files, in a process of its own: EasyBuild keeps state in singletons that other tests must not see.

    worker.py REQUEST.json RESULTS.json

REQUEST: kind (easyconfigs or easyblocks), files, homes (directories they are under), easyblocks (patterns to include),
patches (directories), hooks (directory), prefix (scratch), options (more of eb's). RESULTS: {file: {check: [what is wrong]}}, and of an
easyconfig also its module name (' module') and its patches (' patches').
"""

import contextlib
import json
import logging
import os
import sys
import traceback


def main(request_path, results_path):
    with open(request_path) as stream:
        request = json.load(stream)
    from easybuild.base import fancylogger
    from easybuild.tools.options import set_up_configuration

    options = [
        f'--prefix={request["prefix"]}',
        '--ignoreconfigfiles=',
        '--disable-show-progress-bar',
        '--output-style=no_color',
        *(f'--include-easyblocks={",".join(patterns)}' for patterns in [request['easyblocks']] if patterns),
        *request['options'],
    ]
    set_up_configuration(args=options, silent=True)
    logging.disable(logging.INFO)   # a hundred thousand lines that nobody reads, half of the time
    # they add a parameter to every easyblock
    sys.path.append(request['hooks'])
    import slingshot_hooks  # noqa: F401

    def home_of(path):
        return next(home for home in request['homes'] if path.startswith(home + '/'))

    if request['kind'] == 'easyconfigs':
        import easyconfig_checks as kind

        def context_of(path):
            return kind.Context(path, home_of(path), request['patches'])

    else:
        import easyblock_checks as kind

        syntax = next(option.split('=')[1] for option in request['options'] if option.startswith('--module-syntax'))

        def context_of(path):
            return kind.Context(path, home_of(path), syntax)

    # each easyblock opens a log of its own, to which the next ones would write as well
    logger = fancylogger.getLogger(fname=False)
    handlers = list(logger.handlers)
    start = os.getcwd()
    environment = dict(os.environ)
    results = {}
    for path in request['files']:
        results[path] = {}
        with contextlib.redirect_stdout(sys.stderr):
            context = context_of(path)
            for name, check in kind.CHECKS.items():
                try:
                    results[path][name] = [str(problem) for problem in check(context)]
                except Exception:  # a check that breaks must not pass
                    results[path][name] = ['the check itself failed:\n' + traceback.format_exc()]
                os.chdir(start)
                os.environ.clear()
                os.environ.update(environment)
            for handler in set(logger.handlers).difference(handlers):
                logger.removeHandler(handler)
                handler.close()
            if request['kind'] == 'easyconfigs' and context.app:
                results[path][' module'] = context.ec.full_mod_name
                results[path][' patches'] = kind.patch_names(context.ec)
    with open(results_path, 'w') as stream:
        json.dump(results, stream)


if __name__ == '__main__':
    main(*sys.argv[1:])
