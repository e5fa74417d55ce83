# SPDX-License-Identifier: GPL-2.0-only
"""The table of variables (slingtorch/job/variables.cfg) against what upstream's sources and libraries say."""
import configparser
import os
import pathlib
import re
import sys

import pytest

from slingtorch.job import elf, findings, variables

ROOT = pathlib.Path(__file__).resolve().parents[2]

FAMILIES = variables.read_table()
RECORDS = ROOT / 'tests/records/libnccl'


def found(name, value):
    """What check says of one variable: [(level, text)]."""
    report = findings.Report(0)
    report.fact('env ' + name, value)
    variables.check(report, FAMILIES, variables.LibraryProbe([]), False)
    return [(entry[0], entry[2]) for entry in report.sorted()]


def wrong(name, value):
    family = variables.family_of(name, FAMILIES)
    kind = family.kind(name)
    return variables.wrong_value(kind, value) if kind else ''


def parts(name):
    return variables.family_of(name, FAMILIES).known[name]


@pytest.mark.parametrize('name, value', [
    # ofiwg/libfabric src/log.c: strcasecmp
    ('FI_LOG_LEVEL', 'WARN'), ('FI_LOG_LEVEL', 'Info'),
    # NVIDIA/nccl v2.30.7-1 src/debug.cc; AMD: projects/rccl/docs/api-reference/env-variables.rst
    ('NCCL_DEBUG_SUBSYS', 'ALLOC_HOST'), ('NCCL_DEBUG_SUBSYS', 'INIT,VERBS'), ('NCCL_DEBUG_SUBSYS', '^ALL'),
    ('NCCL_DEBUG_SUBSYS', 'init, net'), ('NCCL_DEBUG', 'ERROR'), ('NCCL_DEBUG', 'info'),
    # src/graph/tuning.cc: 2 is the default; a multiple of 32 from 64; parseList
    ('NCCL_PAT_ENABLE', '2'), ('NCCL_NTHREADS', '96'), ('NCCL_NTHREADS', '640'), ('NCCL_NTHREADS', '1024'),
    ('NCCL_ALGO', 'ring,collnetdirect;allreduce:tree,collnetdirect;broadcast:ring'),
    ('NCCL_PROTO', '^LL128;allreduce:LL128'), ('NCCL_PROTO', 'LL,Simple;allreduce:^LL'),
    # NCCL_PARAM(..., -2)
    ('NCCL_SOCKET_NTHREADS', '-2'), ('NCCL_NSOCKS_PERTHREAD', '-2'), ('NCCL_BUFFSIZE', '-2'),
    # src/graph/paths.cc: numbers above 5 count as 5; param.cc: strtoll in base 0
    ('NCCL_NET_GDR_LEVEL', 'PHB'), ('NCCL_NET_GDR_LEVEL', '6'), ('NCCL_BUFFSIZE', '0x400000'), ('NCCL_IB_TC', ' 106 '),
    # prov/cxi/src/cxip_info.c: '-' counts as '_'
    ('FI_CXI_RDZV_PROTO', 'alt-read'), ('FI_CXI_RDZV_PROTO', 'alt_read'), ('FI_CXI_RX_MATCH_MODE', 'hybrid'),
    ('FI_CXI_RX_MATCH_MODE', 'Hardware'),       # prov/cxi/include/cxip.h: strcasecmp for this word alone
    ('FI_CXI_DEFAULT_TX_SIZE', '16'), ('FI_CXI_DEFAULT_RX_SIZE', '15360'), ('FI_CXI_ODP', 'Off'),
    # prov/cxi/src/cxip_curl.c reads it by getenv
    ('FI_CXI_COLL_FABRIC_MGR_CACERT', '/etc/ssl/ca.pem'),
    # ROCm/MIOpen src/include/miopen/env.hpp
    ('MIOPEN_DISABLE_CACHE', 'enabled'), ('MIOPEN_ENABLE_LOGGING', 'Disable'), ('MIOPEN_FIND_MODE', 'trust_verify'),
    # aws/aws-ofi-nccl include/nccl_ofi_param_impl.h
    ('OFI_NCCL_DISABLE_DMABUF', 'TRUE'), ('OFI_NCCL_DISABLE_DMABUF', '1'), ('OFI_NCCL_PROTOCOL', 'rdma'),
    # plugins/profiler of NVIDIA/nccl
    ('NCCL_INSPECTOR_ENABLE', '1'), ('NCCL_PROFILE_EVENT_MASK', '7'), ('NCCL_INSPECTOR_DUMP_DIR', '/tmp/x'),
    # names that bfcca30 had not
    ('NCCL_IPC_USE_ABSTRACT_SOCKET', '0'), ('NCCL_NET_OVERHEAD', '-2'), ('NCCL_GIN_PROXY_NTHREADS', '2'),
    ('RCCL_TREES', 'x'), ('RCCL_LOG_LEVEL', '3'), ('RCCL_DIRECT_ALLGATHER_DISABLE', '-1'),
    ('RCCL_IB_SPLIT_DATA_THRESHOLD', '128'), ('RCCL_DDA_THRESHOLD', '-1'), ('RCCL_CE_ALLREDUCE', '1'),
    ('FI_HMEM_CUDA_ENABLE_XFER', '0'),
    ('HSA_NO_SCRATCH_THREAD_LIMITER', '1'), ('HSA_SVM_GUARD_PAGES', '0'), ('HSA_ENABLE_SRAMECC', '0'),
    ('HSA_OVERRIDE_GFX_VERSION_1', '9.0.0'),
    ('MIOPEN_RNNFWD_exp', '0'), ('MIOPEN_DEBUG_CONV_DIRECT', '0'), ('MIOPEN_DEBUG_CONV_WINOGRAD', 'no'),
    # HPE displays them, stock MPICH has them
    ('MPICH_SHARED_MEM_COLL_OPT', '1'), ('MPICH_GPU_NO_ASYNC_COPY', '1'), ('MPICH_MPIIO_STATS', '1'),
    ('MPICH_ALLREDUCE_INTRA_ALGORITHM', 'recexch'),
])
def test_right_as_upstream_says(name, value):
    assert found(name, value) == []


@pytest.mark.parametrize('name, value, says', [
    ('FI_CXI_DEFAULT_TX_SIZE', '8', 'not from 16 to 16384'),
    ('FI_CXI_DEFAULT_RX_SIZE', '8', 'not from 16 to 15360'),
    ('FI_CXI_DEFAULT_RX_SIZE', '15361', 'not from 16 to 15360'),
    ('FI_CXI_RDZV_PROTO', 'alt_write', 'none of default, alt_read'),
    ('FI_CXI_RDZV_PROTO', 'ALT_READ', 'none of'),
    ('FI_CXI_RX_MATCH_MODE', 'Software', 'none of'),
    ('NCCL_SOCKET_NTHREADS', '-3', 'not from 1 to 16'),
    ('NCCL_CROSS_NIC', '-2', 'not from 0 to 2'),            # its default is 2 in all tags
    ('FI_LOG_LEVEL', 'verbose', 'none of'),
    ('NCCL_NTHREADS', '100', 'no multiple of 32 from 64'),
    ('NCCL_NTHREADS', '32', 'no multiple of 32 from 64'),
    ('NCCL_BUFFSIZE', '4M', 'counts as 4'),
    ('NCCL_IB_TC', 'low', 'no whole number'),
    ('NCCL_ALGO', 'Ring, Tree', "has ' Tree'"),
    ('NCCL_DEBUG_SUBSYS', 'INIT:NET', "has 'INIT:NET'"),
    ('NCCL_NET_GDR_LEVEL', 'phb', 'none of LOC'),
    # false at HEAD: no word but true and false
    ('OFI_NCCL_DISABLE_DMABUF', 'on', 'none of true, false, a whole number'),
    ('OFI_NCCL_DISABLE_DMABUF', 'yes', 'none of true, false, a whole number'),
    ('OFI_NCCL_CQ_SIZE', '0x100', 'no whole number'),
    ('OFI_NCCL_CQ_SIZE', '256 ', 'no whole number'),
    ('MIOPEN_DISABLE_CACHE', 'y', 'none of'),
    ('HSA_XNACK', 'true', 'none of 0, 1'),
    # MPL_env2bool takes few words, as written
    ('MPICH_BARRIER_DEVICE_COLLECTIVE', 'True', 'none of'),
    ('MPICH_ALLREDUCE_TREE_KVAL', '0x2', 'no whole number'),
    ('MPICH_ALLREDUCE_INTRA_ALGORITHM', 'RING', 'none of auto'),
])
def test_wrong_as_upstream_says(name, value, says):
    assert says in wrong(name, value)
    [(_, text)] = found(name, value)
    assert name in text


@pytest.mark.parametrize('name, part, value', [
    ('NCCL_NVLS_ENABLE', 'since', '2.17.1'), ('NCCL_MIN_CTAS', 'since', '2.17.1'), ('NCCL_MAX_CTAS', 'since', '2.17.1'),
    ('NCCL_COMM_BLOCKING', 'since', '2.14.3'), ('NCCL_DMABUF_ENABLE', 'since', '2.13.4'),
    ('NCCL_NET_OVERHEAD', 'since', '2.18.1'), ('NCCL_IPC_USE_ABSTRACT_SOCKET', 'since', '2.29.2'),
    ('NCCL_IPC_USE_ABSTRACT_SOCKET', 'until', None), ('NCCL_INSPECTOR_ENABLE', 'until', None),
    ('NCCL_SHM_MEMCPY_MODE', 'until', '2.30.4'), ('NCCL_SHM_USE_CUDA_MEMCPY', 'until', '2.30.4'),
    ('NCCL_GIN_PROXY_NTHREADS', 'since', '2.31.2'), ('NCCL_INSPECTOR_ENABLE', 'plugin', 'profiler'),
    ('NCCL_PAT_ENABLE', 'default', '2'), ('NCCL_RINGS', 'only', 'RCCL'),
    ('FI_ADDR_FORMAT', 'since', 'after 2.6.0'), ('FI_HMEM_CUDA_ENABLE_ASYNC_COPY', 'since', 'after 2.6.0'),
    ('FI_HMEM_CUDA_ENABLE_XFER', 'until', '1.18.3'), ('FI_CXI_DEFAULT_TX_SIZE', 'default', '1024'),
    ('FI_CXI_HYBRID_PREEMPTIVE', 'until', None), ('FI_CXI_HYBRID_RECV_PREEMPTIVE', 'until', None),
    ('FI_CXI_HYBRID_POSTED_RECV_PREEMPTIVE', 'until', None),
    ('FI_CXI_HYBRID_UNEXPECTED_MSG_PREEMPTIVE', 'until', None),
    ('FI_CXI_DISABLE_DMABUF_CUDA', 'until', '1.22.0'), ('OFI_NCCL_GIN_TYPE', 'until', '1.20.0'),
])
def test_releases_and_defaults(name, part, value):
    assert parts(name).get(part) == value


@pytest.mark.parametrize('name', [
    'HSA_AMD_P2P', 'MIOPEN_WORKSPACE_LIMIT', 'NCCL_USE_CMAKE',
    # C macros in the texts of assertions
    'NCCL_IB_MAX_DEVS_PER_NIC', 'NCCL_IB_RECV_WR_ID_DUMMY', 'NCCL_IB_RESILIENCY_PORT_RECOVERY_ACK_MSG_ID',
    'NCCL_GIN_CONNECTION_FULL'])
def test_no_library_reads_it(name):
    assert name not in variables.family_of(name, FAMILIES).known
    assert found(name, '1')


def test_all_that_cray_mpich_displays_is_known_with_its_values():
    """tests/records/mpich-display: 100 names, of which bfcca30 called 58 unknown."""
    text = (ROOT / 'tests/records/mpich-display/crusher-8.1.17.txt').read_text()
    shown = re.findall(r'^PE 0: +((?:MPICH|FI)_\w+) += ?(.*)$', text, re.M)
    assert len(shown) == 107
    for name, value in shown:
        assert found(name, value) == [] or not value or value == 'NULL', name


def test_many_of_hsa_and_miopen_are_known():
    known = {family.prefix: len(family.known) for family in FAMILIES}
    assert known['HSA_'] >= 65 and known['MIOPEN_'] >= 200 and known['RCCL_'] >= 90


def test_the_table_can_be_read_whole():
    table = set(variables.KINDS) | {'default', 'since', 'until', 'plugin', 'only', 'note'}
    for family in FAMILIES:
        assert family.known and family.libraries and family.source and family.newest
        assert family.bool[0] in ('choice', 'exact')
        for name, known in family.known.items():
            assert set(known) <= table, name
            kind = family.kind(name)
            numbers = [word for word in kind[1:] if '=' not in word] if kind[:1] in (['int'], ['whole']) else []
            assert len(numbers) in (0, 2), name


def test_what_stands_by_hand_is_in_the_table():
    """Else somebody changed by_hand.cfg and did not make the table again."""
    hand = configparser.RawConfigParser(delimiters=('=',), comment_prefixes=('#',), interpolation=None)
    hand.optionxform = str
    hand.read(ROOT / 'tools/variables/by_hand.cfg')
    for family in FAMILIES:
        for name, value in hand[family.prefix].items():
            said = dict((part.split(None, 1) + [''])[:2] for part in value.split(';') if part.strip())
            for part in set(said) - {'source', 'also', 'text'} if name.startswith(family.prefix) else ():
                assert family.known[name][part] == said[part], name
            assert not name.startswith(family.prefix) or name in family.known


def test_every_default_is_a_right_value():
    for family in FAMILIES:
        for name, known in family.known.items():
            default = known.get('default', '')
            # negative ones are upstream's way to say: not set
            if default and not default.startswith('-') and family.kind(name):
                assert not variables.wrong_value(family.kind(name), default), (name, default)


# --- names against the strings of real libraries


def release(text):
    return [int(part) for part in text.split('.')]


def in_release(known, wanted):
    return release(known.get('since', '0')) <= release(wanted) <= release(known.get('until', '99'))


def check_names(strings, wanted):
    """The table has what a libnccl has, and says of nothing that it has it which it has not."""
    [family] = [family for family in FAMILIES if family.prefix == 'NCCL_']
    nccl = {name for name, known in family.known.items() if not {'plugin', 'only'} & set(known)}
    inside = {name for name in nccl if in_release(family.known[name], wanted)}
    # constants that messages name
    assert strings - inside <= {'NCCL_GIN_CONNECTION_RAIL', 'NCCL_GIN_CONNECTION_FULL', 'NCCL_IB_MAX_DEVS_PER_NIC',
                                'NCCL_IB_RECV_WR_ID_DUMMY', 'NCCL_IB_RESILIENCY_PORT_RECOVERY_ACK_MSG_ID'}
    # PROXY_PROFILE is not compiled in (src/misc/profiler.cc); some of the others stand behind a letter
    assert inside - strings <= {'NCCL_PROXY_PROFILE', 'NCCL_NET_PLUGIN', 'NCCL_PROFILER_PLUGIN'}


@pytest.mark.parametrize('path', sorted(RECORDS.glob('*.txt')), ids=lambda path: path.stem)
def test_names_are_those_of_the_real_libraries(path):
    check_names(set(path.read_text().split('\n')[1:]) - {''}, path.stem)


def test_the_records_reach_from_2_16_to_the_newest():
    assert len(list(RECORDS.glob('*.txt'))) >= 17


def real_libraries():
    """Any libnccl of the Python that runs this, and those of the directory SLINGTORCH_LIBNCCL."""
    places = [pathlib.Path(path) for path in sys.path + [os.environ.get('SLINGTORCH_LIBNCCL', '/nonexistent')]]
    return sorted({path for place in places if place.is_dir()
                   for pattern in ('nvidia/nccl/lib/libnccl.so*', '*/libnccl.so*') for path in place.glob(pattern)})


if real_libraries():        # 200 MB each: the tests install none
    @pytest.mark.parametrize('path', real_libraries(), ids=str)
    def test_a_libnccl_at_hand_has_the_names_of_its_record(path):
        library = elf.Library(str(path))
        version = library.match(re.compile(rb'NCCL version (2\.\d+\.\d+)')).group(1).decode()
        names = set((RECORDS / (version + '.txt')).read_text().split('\n')[1:]) - {''}
        assert all(library.has_string(name) for name in names)
