# SPDX-License-Identifier: GPL-2.0-only
"""EasyBuild's own checks of easyblocks, over every one of the bundle."""

import pytest

import easyblock_checks
import testbed
import upstream_files

CHECKS = [
    (syntax, check)
    for check in easyblock_checks.CHECKS
    for syntax in (['lua', 'tcl'] if check == 'module_only' else ['lua'])
]


def run_checks(request, files, home, include):
    """{syntax: {file: {check: what is wrong}}} with Lmod and with Environment Modules."""
    return {
        syntax: request.getfixturevalue(f'{syntax}_checker')('easyblocks', files, [home], include)
        for syntax in ('lua', 'tcl')
    }


@pytest.fixture(scope='module')
def results(request):
    return run_checks(request, upstream_files.EASYBLOCKS, testbed.ROOT / 'easyblocks', upstream_files.INCLUDE)


def test_there_are_easyblocks():
    assert upstream_files.EASYBLOCKS


@pytest.mark.parametrize('syntax, check', CHECKS)
@pytest.mark.parametrize('path', upstream_files.EASYBLOCKS, ids=upstream_files.name)
def test_easyblock(results, path, syntax, check):
    wrong = results[syntax][str(path)][check]
    assert not wrong, '\n'.join([f'{path.name}: {easyblock_checks.CHECKS[check].__doc__}', *wrong])


# --- each check can fail

GOOD = '''"""Support for nothing."""
from easybuild.framework.easyblock import EasyBlock
from easybuild.framework.easyconfig import CUSTOM


class NAME(EasyBlock):
    """Nothing."""

    @staticmethod
    def extra_options(extra_vars=None):
        """Parameters."""
        extra_vars = EasyBlock.extra_options(extra_vars)
        extra_vars.update({'nothing': [None, "Nothing", CUSTOM]})
        return extra_vars

    def prepare_step(self, *args, **kwargs):
        """Prepare nothing."""
        super().prepare_step(*args, **kwargs)

    def make_module_extra(self, *args, **kwargs):
        """Set nothing."""
        txt = super().make_module_extra(*args, **kwargs)
        return txt + self.module_generator.set_environment('NOTHING', 'nothing')
'''

# (check, number): what is replaced by what in the good easyblock
BAD = {
    ('importable', 1): ('from easybuild.framework.easyconfig import CUSTOM', 'from easybuild.nowhere import CUSTOM'),
    ('importable', 2): ('class NAME(EasyBlock)', 'class NAME(EasyBlock'),
    ('location', 1): ('class NAME(EasyBlock)', 'class EB_NAME(EasyBlock)'),
    ('class_on_one_line', 1): ('class NAME(EasyBlock)', 'class NAME(EasyBlock,\n           object)'),
    ('no_log_errors', 1): ('super().prepare_step', 'self.log.error("no")\n        super().prepare_step'),
    ('no_log_errors', 2): ('super().prepare_step', 'assert self.name\n        super().prepare_step'),
    ('no_log_errors', 3): ('super().prepare_step', 'print("no")\n        super().prepare_step'),
    ('no_log_errors', 4): ('super().prepare_step', 'raise Exception("no")\n        super().prepare_step'),
    ('prepare_step_passes_on', 1): (
        'def prepare_step(self, *args, **kwargs)',
        'def prepare_step(self, args=(), kwargs={})',
    ),
    ('prepare_step_passes_on', 2): ('.prepare_step(*args, **kwargs)', '.prepare_step()'),
    ('extra_options_well_formed', 1): ('extra_vars=None', 'extra_vars'),
    ('extra_options_well_formed', 2): ('"Nothing", CUSTOM', '"", CUSTOM'),
    ('extra_options_well_formed', 3): ("'nothing':", "'no-thing':"),
    ('extra_options_well_formed', 4): ('return extra_vars', 'return None'),
    ('extra_options_well_formed', 5): ('[None, "Nothing", CUSTOM]', '[None, "Nothing"]'),
    ('instantiable', 1): (
        'def prepare_step',
        'def __init__(self, cfg):\n        super().__init__(cfg)\n'
        '        self.nothing = self.cfg["sources"][0]\n\n    def prepare_step',
    ),
    ('nothing_deprecated', 1): ('import CUSTOM', 'import CUSTOM\nfrom easybuild.tools.run import run_cmd'),
    ('nothing_deprecated', 2): (
        'def make_module_extra',
        'def post_install_step(self):\n        """No."""\n\n    def make_module_extra',
    ),
    ('module_only', 1): ("'nothing')", "str(self.cfg['nothing']))"),
    ('module_only', 2): ('super().prepare_step', 'open("/nonexistent")\n        super().prepare_step'),
    ('docstrings', 1): ('    """Nothing."""\n', ''),
    ('docstrings', 2): ('        """Prepare nothing."""\n', ''),
    ('docstrings', 3): ('"""Support for nothing."""\n', ''),
}


@pytest.fixture(scope='module')
def samples(request, tmp_path_factory):
    """{syntax: {sample: {check: what is wrong}}}"""
    home = tmp_path_factory.mktemp('samples')
    (home / 'generic').mkdir()
    files = {}
    for sample, change in {'good': None, **BAD}.items():
        name = 'Sample' + ''.join(map(str, sample)).title().replace('_', '')
        text = GOOD.replace(*change) if change else GOOD
        assert not change or text != GOOD, sample
        files[sample] = home / 'generic' / f'{name.lower()}.py'
        files[sample].write_text(text.replace('NAME', name))
    # eb refuses to start when one of the files it is to include cannot be imported
    include = [path for sample, path in files.items() if sample[0] != 'importable']
    found = run_checks(request, files.values(), home, include)
    return {syntax: {sample: found[syntax][str(path)] for sample, path in files.items()} for syntax in found}


def test_every_check_has_a_bad_sample():
    assert {check for check, _ in BAD} == set(easyblock_checks.CHECKS)


@pytest.mark.parametrize('syntax', ['lua', 'tcl'])
def test_good_sample_passes(samples, syntax):
    assert not {check: wrong for check, wrong in samples[syntax]['good'].items() if wrong}


@pytest.mark.parametrize('sample', BAD, ids=lambda sample: '-'.join(map(str, sample)))
@pytest.mark.parametrize('syntax', ['lua', 'tcl'])
def test_bad_sample_is_found(samples, sample, syntax):
    wrong = samples[syntax][sample][sample[0]]
    assert wrong and 'the check itself failed' not in str(wrong)
