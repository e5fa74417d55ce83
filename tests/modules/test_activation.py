# SPDX-License-Identifier: GPL-2.0-only
"""A shell after `slingtorch env`, with either modules tool: `eb`, `module load`, `eb` again."""
import os

import pytest

from testbed import quickvenv, wheels
from testbed.easybuild import BIN

pytestmark = pytest.mark.real


@pytest.mark.parametrize('tool, scheme', [('lmod', 'HierarchicalMNS'), ('envmodules', 'EasyBuildMNS')])
def test_shell_goes_on_working(tmp_path, request, tool, scheme):
    """The module is visible where `eb` made it, and `eb` works after it brought its own Python."""
    modulestool = request.getfixturevalue(tool)
    made = wheels.make_wheel(tmp_path / '.local/easybuild/sources/p/PyTorch/wheels', 'alpha', '1.0')
    (tmp_path / 'PyTorch-0.1-tiny.lock').write_text(wheels.lock_text([made]))
    (tmp_path / 'PyTorch-0.1-tiny.eb').write_text(wheels.tiny_easyconfig(tmp_path / 'PyTorch-0.1-tiny.lock'))
    env = {'PATH': f'{quickvenv.python3()}:{BIN}:{os.environ["PATH"]}', 'HOME': tmp_path, 'PIP_CONFIG_FILE': '/dev/null', 'PIP_NO_INDEX': '1',
           'PIP_EXTRA_INDEX_URL': None, 'EASYBUILD_OUTPUT_STYLE': 'no_color',
           'EASYBUILD_MODULE_NAMING_SCHEME': scheme, 'EASYBUILD_ALLOW_USE_AS_ROOT_AND_ACCEPT_CONSEQUENCES': '1'}
    done = modulestool.bash('''
        set -e
        eval "$(slingtorch env)"
        eb PyTorch-0.1-tiny.eb
        module load PyTorch/0.1-tiny
        $RUNSCRIPTS/conda-python-distributed -c 'import alpha; print("imported")'
        eb --dry-run PyTorch-0.1-tiny.eb
    ''', env=env, cwd=tmp_path, timeout=500)
    assert 'COMPLETED: Installation ended successfully' in done.stdout and 'imported\n' in done.stdout
    assert '[x]' in done.stdout.rpartition('imported\n')[2]
