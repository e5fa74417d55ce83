# SPDX-License-Identifier: GPL-2.0-only
"""The hooks in real runs of eb: the module files that come out."""
import pytest

from testbed import easybuild

EASYCONFIG = """
easyblock = 'Binary'
name = 'PyTorch'
version = '9.9'
homepage = 'https://example.org'
description = "a tiny one"
toolchain = SYSTEM
sources = []
extract_sources = True
install_cmd = "mkdir -p %(installdir)s/bin && touch %(installdir)s/bin/tool"
sanity_check_paths = {'files': ['bin/tool'], 'dirs': []}
modextravars = {'NCCL_CROSS_NIC': '2'}
moduleclass = 'ai'
"""


@pytest.fixture(params=['lmod, Lua', 'lmod, Tcl', 'envmodules, Tcl'])
def tool_and_syntax(request):
    tool, syntax = request.param.split(', ')
    return request.getfixturevalue(tool), syntax


def show(prefix):
    """Shell code that prints some variables."""
    return ''.join('echo "%s %s=${%s-unset}"\n' % (prefix, name, name) for name in
                   ('NCCL_SOCKET_IFNAME', 'FI_MR_CACHE_MONITOR', 'SLINGTORCH_MULTINODE_NCCL_NET', 'NCCL_CROSS_NIC',
                    'FI_CXI_RDZV_PROTO', 'NCCL_NET'))


def test_module(tool_and_syntax, tmp_path):
    """Loading gives the site's values, unloading gives the user's own back."""
    tool, syntax = tool_and_syntax
    eb = easybuild.EasyBuild(tmp_path / 'eb', tool, ['--site', 'derecho', '--with', 'alt_read'])
    (tmp_path / 'PyTorch-9.9.eb').write_text(EASYCONFIG)
    done = eb(tmp_path / 'PyTorch-9.9.eb', '--module-syntax=%s' % syntax)
    assert done.stdout.count('slingtorch: site derecho: PyTorch-9.9.eb: 11 site values') == 1
    assert 'group alt_read, which needs: mpiexec --disable-rdzv-get' in done.stdout

    amended = eb('PyTorch-9.9.eb', '--try-amend=versionsuffix=-mine', '--module-only', '--force', cwd=tmp_path)
    said = [line for line in amended.stdout.splitlines() if 'slingtorch' in line]
    assert len(said) == 1 and 'slingtorch: site derecho: PyTorch-9.9-mine.eb: 11 site values' in said[0]

    module_file = eb.modulepath / ('PyTorch/9.9' + ('.lua' if syntax == 'Lua' else ''))
    text = module_file.read_text()
    expected = {'Lua': 'pushenv("FI_MR_CACHE_MONITOR", "userfaultfd")', 'Tcl': 'pushenv\tFI_MR_CACHE_MONITOR'}
    assert expected[syntax] in text
    assert 'NCCL_NET_GDR_LEVEL' not in text

    environ = {'NCCL_SOCKET_IFNAME': 'eth7', 'NCCL_CROSS_NIC': '0'}
    if tool.name == 'Lmod' and syntax == 'Tcl':
        # Lmod 8.6 with its built-in Tcl interpreter forgets the former value of pushenv (docs/activation.md)
        environ['LMOD_FAST_TCL_INTERP'] = 'no'
    script = 'module load PyTorch || exit 1\n%s\nmodule unload PyTorch || exit 1\n%s' % (show('in'), show('out'))
    done = tool.bash(script, modulepath=[eb.modulepath], env=environ)
    assert done.stdout.splitlines() == [
        'in NCCL_SOCKET_IFNAME=hsn', 'in FI_MR_CACHE_MONITOR=userfaultfd',
        'in SLINGTORCH_MULTINODE_NCCL_NET=AWS Libfabric', 'in NCCL_CROSS_NIC=2', 'in FI_CXI_RDZV_PROTO=alt_read',
        'in NCCL_NET=unset',
        # NCCL_CROSS_NIC is the easyconfig's own entry, without pushenv
        'out NCCL_SOCKET_IFNAME=eth7', 'out FI_MR_CACHE_MONITOR=unset', 'out SLINGTORCH_MULTINODE_NCCL_NET=unset',
        'out NCCL_CROSS_NIC=unset', 'out FI_CXI_RDZV_PROTO=unset', 'out NCCL_NET=unset',
    ]
