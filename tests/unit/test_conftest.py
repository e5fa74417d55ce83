# SPDX-License-Identifier: GPL-2.0-only
"""tests/conftest.py: the tests of a checkout test this checkout, whichever one their virtual environment is of."""
import pathlib
import subprocess
import sys

import testbed

WHERE = '''
import pathlib, subprocess, sys
import slingtorch, testbed

def test_where():
    code = 'import slingtorch; print(slingtorch.__file__)'
    for env in (None, testbed.clean_environ()):
        child = subprocess.check_output([sys.executable, '-c', code], env=env, cwd='/', text=True)
        for path in (slingtorch.__file__, child.strip()):
            assert pathlib.Path(path).parents[1] == testbed.ROOT
'''


def test_another_checkout_with_this_virtual_environment_tests_itself(tmp_path):
    copy = testbed.copy_of_checkout(tmp_path / 'copy')
    (copy / 'tests/unit/test_where.py').write_text(WHERE)
    pytest = pathlib.Path(sys.executable).with_name('pytest')    # "python -m pytest" would add the directory itself
    env = {**testbed.clean_environ(), 'SLINGTORCH_TEST_DIR': str(testbed.DIR)}
    env.pop('PYTHONPATH', None)
    done = subprocess.run([pytest, '-q', '-n', '0', 'tests/unit/test_where.py'], cwd=copy, env=env,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout


def test_the_modules_tool_of_a_login_shell_does_not_reach_the_tests(monkeypatch):
    for name in ('BASH_FUNC_module%%', 'BASH_ENV', 'LMOD_CMD'):
        monkeypatch.setenv(name, 'x')
        assert name not in testbed.clean_environ()
