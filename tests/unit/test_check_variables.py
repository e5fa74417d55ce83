# SPDX-License-Identifier: GPL-2.0-only
"""The table of variables (slingtorch/job/variables.cfg) against what upstream's sources and libraries say."""
import pathlib
import re

import pytest

from slingtorch.job import findings, variables

ROOT = pathlib.Path(__file__).resolve().parents[2]

FAMILIES = variables.read_table()


def found(name, value):
    """What check says of one variable: [(level, text)]."""
    report = findings.Report(0)
    report.fact('env ' + name, value)
    variables.check(report, FAMILIES, [], [], False)
    return [(entry[0], entry[2]) for entry in report.sorted()]


def wrong(name, value):
    family = variables.family_of(name, FAMILIES)
    return variables.wrong_text(name, value, family)


@pytest.mark.parametrize('name, value', [
    # ofiwg/libfabric src/log.c: strcasecmp
    ('FI_LOG_LEVEL', 'WARN'), ('FI_LOG_LEVEL', 'Info'),
    # NVIDIA/nccl v2.30.7-1 src/debug.cc; AMD: projects/rccl/docs/api-reference/env-variables.rst
    ('NCCL_DEBUG_SUBSYS', 'ALLOC_HOST'), ('NCCL_DEBUG_SUBSYS', 'INIT,VERBS'), ('NCCL_DEBUG_SUBSYS', '^ALL'),
    ('NCCL_DEBUG_SUBSYS', 'init, net'), ('NCCL_DEBUG', 'ERROR'), ('NCCL_DEBUG', 'info'),
    # src/graph/tuning.cc: 2 is the default; from 64; parseList
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
    # ROCm/MIOpen src/include/miopen/env.hpp
    ('MIOPEN_DISABLE_CACHE', 'enabled'), ('MIOPEN_ENABLE_LOGGING', 'Disable'), ('MIOPEN_FIND_MODE', 'trust_verify'),
    # aws/aws-ofi-nccl include/nccl_ofi_param_impl.h
    ('OFI_NCCL_DISABLE_DMABUF', 'TRUE'), ('OFI_NCCL_DISABLE_DMABUF', '1'), ('OFI_NCCL_PROTOCOL', 'rdma'),
    ('RCCL_LOG_LEVEL', '3'),
    ('HSA_ENABLE_SRAMECC', '0'), ('MIOPEN_DEBUG_CONV_WINOGRAD', 'no'), ('MPICH_SHARED_MEM_COLL_OPT', '1'),
    ('hsa_tomorrow', '1'), ('fi_provider', 'cxi'), ('NCCL_DEBUG', 'INFO'),
    ('NCCL_IB_TC', '106 '), ('FI_CXI_RDZV_THRESHOLD', ' 16384 '),   # strtol(3) reads them
    ('NCCL_IB_TC', ''), ('RCCL_IB_QPS_PER_P2P', ''),                # ncclLoadParam: as if not set
])
def test_right_as_upstream_says(name, value):
    assert found(name, value) == []


@pytest.mark.parametrize('name, value, says', [
    ('FI_CXI_DEFAULT_TX_SIZE', '8', 'not between 16 and 16384'),
    ('FI_CXI_DEFAULT_RX_SIZE', '8', 'not between 16 and 15360'),
    ('FI_CXI_DEFAULT_RX_SIZE', '15361', 'not between 16 and 15360'),
    ('FI_CXI_RDZV_PROTO', 'alt_write', 'not one of default, alt_read'),
    ('FI_CXI_RDZV_PROTO', 'ALT_READ', 'not one of'),
    ('FI_CXI_RX_MATCH_MODE', 'soft', 'not one of'),
    ('NCCL_SOCKET_NTHREADS', '-3', 'not between 1 and 16'),
    ('NCCL_CROSS_NIC', '-2', 'not between 0 and 2'),            # its default is 2 in all tags
    ('FI_LOG_LEVEL', 'verbose', 'not one of'),
    ('NCCL_NTHREADS', '32', 'not between 64 and '),
    ('NCCL_BUFFSIZE', '4M', 'is read as 4'),
    ('NCCL_IB_TC', 'low', 'not a whole number'),
    ('NCCL_ALGO', 'Ring,Trees', "has 'Trees'"),
    ('NCCL_NET_GDR_LEVEL', 'phb', 'not one of LOC'),
    # false at HEAD: no word but true and false
    ('OFI_NCCL_DISABLE_DMABUF', 'on', 'not one of true, false, a whole number'),
    ('OFI_NCCL_DISABLE_DMABUF', 'yes', 'not one of true, false, a whole number'),
    ('OFI_NCCL_DISABLE_DMABUF', '1x', 'not one of'),            # and nothing may follow a number
    ('MIOPEN_DISABLE_CACHE', 'y', 'not one of'),
    ('HSA_XNACK', 'true', 'not one of 0, 1'),
    ('NCCL_DEBUG', 'INFO ', 'begins or ends with a space'), ('FI_CXI_ODP', '1 ', 'begins or ends with a space'),
    ('NCCL_IB_TC', 'x ', 'is not a whole number'), ('NCCL_SOCKET_FAMILY', '', 'is empty'),
    ('FI_CXI_RDZV_THRESHOLD', '', 'is empty'), ('FI_CXI_ODP', '', 'is empty'),
])
def test_wrong_as_upstream_says(name, value, says):
    assert says in wrong(name, value)
    [(level, text)] = found(name, value)
    assert level == 'yellow' and text.startswith(f'{name}={value!r} {wrong(name, value)}')


@pytest.mark.parametrize('name, meant', [
    ('FI_CXI_RDV_PROTO', 'FI_CXI_RDZV_PROTO'), ('NCCL_IB_DISABEL', 'NCCL_IB_DISABLE'),
    # with nobody to ask, a name that the table has not may be right
    ('NCCL_TOMORROW', None), ('FI_EFA_TOMORROW', None), ('MIOPEN_RNNFWD_exp', None),
])
def test_a_name_that_no_library_was_asked_for(name, meant):
    assert [entry[1].partition('. Perhaps it should be ')[2] for entry in found(name, '1')] == ([meant] if meant else [])


def test_all_that_cray_mpich_displays_is_known_with_its_values():
    """tests/records/mpich-display: 100 names, of which bfcca30 called 58 unknown."""
    text = (ROOT / 'tests/records/mpich-display/crusher-8.1.17.txt').read_text()
    shown = re.findall(r'^PE 0: +((?:MPICH|FI)_\w+) += ?(.*)$', text, re.M)
    assert len(shown) == 107
    for name, value in shown:
        assert found(name, value) == [] or not value or value == 'NULL', name


def test_the_table_can_be_read_whole():
    for family in FAMILIES:
        assert family.known and family.libraries and family.source and family.newest
        for name, kind in family.known.items():
            assert not kind or kind[0] == 'int' or kind[0] in ('choice', 'exact', 'words') and kind[1:], name
            assert kind[:1] != ['int'] or len([int(number) for number in kind[1:]]) in (0, 2, 3), name
