# SPDX-License-Identifier: GPL-2.0-only
"""tools/variables/make.py on small checkouts: the same sources give the same table; what stands by hand is merged."""
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / 'tools/variables'))

import make             # noqa: E402


class Checkout:
    """A git repository with releases."""

    def __init__(self, path):
        self.path = path
        path.mkdir(parents=True)
        self.git('init', '-q')

    def git(self, *args):
        subprocess.run(('git', '-c', 'user.name=a', '-c', 'user.email=a@example.org') + args, cwd=self.path, check=True)

    def release(self, tag, **files):
        for name, text in files.items():
            path = self.path / name.replace('__', '/').replace('_c', '.c')
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        self.git('add', '-A')
        self.git('commit', '-qm', tag or 'new')
        if tag:
            self.git('tag', tag)


@pytest.fixture
def by_hand(tmp_path):
    path = tmp_path / 'by_hand.cfg'
    path.write_text('[NCCL_]\nlibrary = libnccl\nexcept = *_INITIALIZER\n'
                    'NCCL_NTHREADS = int step=32; source tuning.cc\nNCCL_LEVEL = also ATTN; source strings\n'
                    'NCCL_BY_HAND = text; note only here; source a page\n')
    return path


@pytest.fixture
def nccl(tmp_path):
    checkout = Checkout(tmp_path / 'upstream/nccl')
    checkout.release('v2.11.4-1', src__init_cc='NCCL_PARAM(Old, "OLD", 1);\nNCCL_PARAM(Nthreads, "NTHREADS", -2);\n'
                                               'x = getenv("NCCL_FILE");\n')
    checkout.release('v2.12.7-1', src__init_cc='NCCL_PARAM(Nthreads, "NTHREADS", -2);\nx = ncclGetEnv("NCCL_FILE");\n'
                                               'NCCL_PARAM(Size, "SIZE", 1LL << 20);\nWARN("NCCL_X_INITIALIZER");\n'
                                               'DEFINE_NCCL_PARAM(p, level, NCCL_LEVEL, NONE,\n 0,\n'
                                               '  ncclParamOneOf<l>(makeOptions(makeOption("WARN", 1, "a"),\n'
                                               '  makeOption("INFO", 2, "b"))), "help");\n\n',
                     plugins__profiler__p_cc='getenv("NCCL_PROFILE_MASK");')
    return checkout


WANTED = '''
[NCCL_]
library = libnccl
newest = 2.12.7
source = NVIDIA/nccl 2.11.4 to 2.12.7 (%s)
NCCL_BY_HAND = note only here
NCCL_FILE =
NCCL_LEVEL = choice WARN INFO ATTN; since 2.12.7
NCCL_NTHREADS = int step=32; default -2
NCCL_OLD = int; default 1; until 2.11.4
NCCL_PROFILE_MASK = since 2.12.7; plugin profiler
NCCL_SIZE = int; default 1048576; since 2.12.7
'''


def test_the_table_of_a_small_checkout_twice(nccl, by_hand, tmp_path):
    text = make.make(str(tmp_path / 'upstream'), ('NCCL_',), str(by_hand))
    commit = subprocess.run(['git', 'rev-parse', '--short=9', 'HEAD'], cwd=nccl.path, stdout=subprocess.PIPE,
                            universal_newlines=True, check=True).stdout.strip()
    assert text[text.index('\n[NCCL_]'):] == WANTED % commit
    assert make.make(str(tmp_path / 'upstream'), ('NCCL_',), str(by_hand)) == text


def test_names_of_a_newer_library_and_of_a_plugin(nccl, by_hand, tmp_path):
    strings = {'2.13.4': {'NCCL_NTHREADS', 'NCCL_LEVEL', 'NCCL_SIZE', 'NCCL_NEW'}}
    text = make.make(str(tmp_path / 'upstream'), ('NCCL_',), str(by_hand), strings)
    assert 'newest = 2.13.4\n' in text and '\nNCCL_NEW = since 2.13.4\n' in text
    # no library has the name of a plugin's variable among its strings
    assert '\nNCCL_PROFILE_MASK = since 2.12.7; plugin profiler\n' in text


def test_what_is_not_there_is_said(tmp_path, by_hand):
    with pytest.raises(SystemExit, match='git clone --bare https://github.com/NVIDIA/nccl'):
        make.make(str(tmp_path), ('NCCL_',), str(by_hand))


def test_a_part_that_nobody_knows_is_said():
    with pytest.raises(SystemExit, match='NCCL_X: no such part: untill'):
        make.line('NCCL_X', {'untill': '2'})


@pytest.mark.parametrize('text, value', [
    ('1LL << 30', 1 << 30), ('(size_t)(2) * 1024 * 1024', 2 << 20), ('-2', -2), ('16384U', 16384), ('(AA - BB)', 15360),
    ('NCCL_UNDEF', None), ('a()', None),
])
def test_numbers_of_sources(text, value):
    assert make.number(text, {'AA': '16384U', 'BB': '1024U'}) == value


def sample(path, prefix, text, name):
    """What the extractor of a prefix reads in one file."""
    checkout = Checkout(path)
    (checkout.path / name).parent.mkdir(parents=True)
    (checkout.path / name).write_text(text)
    checkout.release('')
    return make.EXTRACTORS[prefix](make.Tree(str(checkout.path / '.git'), 'HEAD'))


@pytest.mark.parametrize('prefix, name, text, wanted', [
    ('RCCL_', 'src/a.cc', 'RCCL_PARAM(X, "X_ENABLE", 1);\n', {'RCCL_X_ENABLE': {'int': '', 'default': '1'}}),
    ('OFI_NCCL_', 'include/nccl_ofi_param.h',
     'OFI_NCCL_PARAM_VALUE_SET(P, (SENDRECV)(RDMA))\nOFI_NCCL_PARAM(P, p, "PROTOCOL", P::RDMA);\n'
     'OFI_NCCL_PARAM(bool, b, "B", false);\nOFI_NCCL_PARAM_INT(n, "N", 4);\n',
     {'OFI_NCCL_PROTOCOL': {'choice': 'SENDRECV RDMA'}, 'OFI_NCCL_B': {'bool': '', 'default': 'false'},
      'OFI_NCCL_N': {'whole': '', 'default': '4'}}),
    ('FI_', 'prov/cxi/src/cxip_info.c',
     'fi_param_define(&cxip_prov, "mode", FI_PARAM_STRING,\n"x");\nfi_param_get_str(&cxip_prov, "mode", &param_str);\n'
     "if (param_str) { while (*ch == '-') ; if (!strcmp(param_str, \"a_b\")) ; param_str = NULL; }\n"
     'fi_param_define(&cxip_prov, "size", FI_PARAM_SIZE_T, "x");\n'
     'if (cxip_env.size < 16 ||\n cxip_env.size > 64) ;\n'
     'getenv("FI_CXI_CERT");\nfi_param_define(NULL, "odp", FI_PARAM_BOOL, "x");\n',
     {'FI_CXI_MODE': {'exact': 'a_b dash=_'}, 'FI_CXI_SIZE': {'int': '16 64'}, 'FI_CXI_CERT': {'text': ''},
      'FI_ODP': {'bool': ''}}),
    ('MPICH_', 'src/a.c',
     '/*\n=== BEGIN_MPI_T_CVAR_INFO_BLOCK ===\ncvars:\n'
     '    - name        : MPIR_CVAR_ALG\n      type        : enum\n'
     '      default     : auto\n'
     '      description : |-\n        Which one\n        auto - itself\n        ring   - a ring\n\n'
     '    - name        : MPIR_CVAR_PORT\n      alt-env     : MPIR_CVAR_PORTS\n      type        : int\n'
     '      default     : 3\n=== END_MPI_T_CVAR_INFO_BLOCK ===\n*/\n',
     {'MPICH_ALG': {'exact': 'auto ring'}, 'MPICH_PORT': {'whole': '', 'default': '3'},
      'MPICH_PORTS': {'whole': '', 'default': '3'}}),
    ('HSA_', 'src/flag.h', 'var = os::GetEnvVar("HSA_A");\na_ = (var == "1") ? true : false;\n'
                           'var = os::GetEnvVar("HSA_N"); n_ = atoi(var.c_str());\n',
     {'HSA_A': {'exact': '0 1'}, 'HSA_N': {'int': 'base=10'}}),
    ('MIOPEN_', 'src/a.cpp', 'MIOPEN_DECLARE_ENV_VAR_BOOL(MIOPEN_B)\nMIOPEN_DECLARE_ENV_VAR_UINT64(MIOPEN_N, 3)\n',
     {'MIOPEN_B': {'bool': ''}, 'MIOPEN_N': {'int': ''}}),
])
def test_each_upstream(prefix, name, text, wanted, tmp_path):
    assert sample(tmp_path / 'upstream', prefix, text, name) == wanted
