# SPDX-License-Identifier: GPL-2.0-only
"""get-master: the first host of a host list or node file, and where a malformed one is wrong."""

import os
import pathlib
import shutil
import subprocess
import tempfile

import pytest

from slingtorch.job.machine import expand_hosts
from testbed import messages

GET_MASTER = pathlib.Path(__file__).resolve().parents[2] / "runscripts" / "get-master"


def get_master(*args, env=(), **more):
    return subprocess.run([str(GET_MASTER), *args], env={"PATH": "/usr/bin:/bin", **dict(env)}, capture_output=True,
                          text=True, timeout=300, **more)


def first(*args, **more):
    done = get_master(*args, **more)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("\n") and done.stdout.count("\n") == 1
    return done.stdout[:-1]


def error(*args, status=2, **more):
    done = get_master(*args, **more)
    assert (done.returncode, done.stdout) == (status, "")
    assert done.stderr.startswith("get-master: ") and done.stderr.count("\n") == 1
    assert done.stderr[:-1].isprintable()
    messages.known(done.stderr)
    return done.stderr


@pytest.mark.parametrize("hostlist,host", [
    ("nid005001", "nid005001"), ("nid[005001]", "nid005001"), ("nid[005001-005004,005010]", "nid005001"),
    ("nid[005001,005004]", "nid005001"), ("nid005001,nid005003", "nid005001"), ("nid[001,003-005],gpu-a01", "nid001"),
    ("gpu-a01,nid[001,003-005]", "gpu-a01"), ("gpu-a[001-004]", "gpu-a001"), ("x1000c0s[0-3]b0n0", "x1000c0s0b0n0"),
    ("x1000c0s[0-3]b[0-1]n[0-1]", "x1000c0s0b0n0"), ("nid[001-002]-hsn", "nid001-hsn"),
    ("nid[001-002]-hsn,nid[003-004]-hsn", "nid001-hsn"), ("rack[1-2]node[01-16]", "rack1node01"), ("a[1][2]b", "a12b"),
    ("n[08-11]", "n08"), ("n[000000000000000001-000000000000000002]", "n000000000000000001"), ("n[7-7]", "n7"),
    ("node_1.cluster.example.org,b", "node_1.cluster.example.org"), ("1a,b", "1a"),
])
def test_grammar(hostlist, host):
    assert first(hostlist) == host == expand_hosts(hostlist)[0]


@pytest.mark.parametrize("hostlist,place", [
    ("", 1), ("nid[1-", 4), ("nid[", 4), ("nid[1", 4), ("a,nid[1-2],b[3", 13), ("nid[[1]]", 4), ("nid[1[2]]", 4),
    ("nid]1[2]", 4), ("nid[1]]", 7), ("nid[]", 4), ("nid[1,,2]", 4), ("nid[,1]", 4), ("nid[a-b]", 4), ("nid[1-]", 4),
    ("nid[-1]", 4), ("nid[5-1]", 4), ("nid[1-2-3]", 4), ("nid[1-9999999999999999999]", 4), ("nid[1-2],b[9-8]", 11),
    ("a,,b", 2), ("a[1-2],,b", 7), (",a", 1), ("a,", 2), ("a[1-2],", 7), ("[1-2]", 1), ("a,[1-2]", 2), ("a b", 2),
    (" a", 1), ("a\tb", 2), ("a\n", 2), ("a\x1b[31m", 2), ("nid[1-2]$(id)", 9), ("a;b", 2), ("*", 1), ("ä", 1),
    ("a,-b", 2),
])
def test_malformed(hostlist, place):
    message = error(hostlist)
    assert f", see character {place}: " in message and "A list looks like nid[" in message


def test_range_the_wrong_way_round_and_a_file_named_like_the_pattern(tmp_path):
    assert "LOW-HIGH" in error("nid[5-1]") and "18 digits" in error("nid[1-9999999999999999999]")
    (tmp_path / "nid1").touch()
    error("nid[1-2]*", cwd=tmp_path)


def test_usage():
    done = get_master("--help")
    assert done.returncode == 0 and "\nUsage: get-master [HOSTLIST]\n" in done.stdout and done.stderr == ""
    assert get_master("-h").stdout == done.stdout
    assert "unknown option '--hosts'" in error("--hosts")
    assert "quote the list" in error("nid1", "nid2")


def test_where_the_list_comes_from(tmp_path):
    nodes = tmp_path / "nodes"
    nodes.write_text("pbs1\n")
    sge = tmp_path / "sge"
    sge.write_text("sge1 2 all.q UNDEFINED\n")
    env = {"SLURM_STEP_NODELIST": "step[1-2]", "SLURM_JOB_NODELIST": "job[1-2]", "SLURM_NODELIST": "old[1-2]",
           "PBS_NODEFILE": str(nodes), "LSB_DJOB_HOSTFILE": str(nodes), "PE_HOSTFILE": str(sge)}
    for name, host in zip(env, ("step1", "job1", "old1", "pbs1", "pbs1", "sge1")):
        assert first(env=env) == host
        env[name] = ""
    error(env=env, status=1)
    assert first("arg1", env={"SLURM_STEP_NODELIST": "step1"}) == "arg1"
    assert error(env={"SLURM_JOB_NODELIST": "nid[1-"}).startswith("get-master: SLURM_JOB_NODELIST: ")


@pytest.mark.parametrize("text,host", [
    ("deg0001.hsn.de.hpc.ucar.edu\ndeg0002\n", "deg0001.hsn.de.hpc.ucar.edu"), ("\n  \n\t\nnode1\n", "node1"),
    ("node1\r\nnode2\r\n", "node1"), ("\r\nnode1\r\n", "node1"), ("  node1  \n", "node1"), ("node1", "node1"),
])
def test_node_file(tmp_path, text, host):
    nodes = tmp_path / "node file"
    nodes.write_bytes(text.encode())
    assert first(env={"PBS_NODEFILE": str(nodes)}) == host


def test_node_file_errors(tmp_path):
    nodes = tmp_path / "nodes"
    assert "does not exist" in error(env={"PBS_NODEFILE": str(nodes)}, status=1)
    assert "not a regular file" in error(env={"PBS_NODEFILE": str(tmp_path)}, status=1)
    for text in ("", "\n\n", " \r\n"):
        nodes.write_text(text)
        assert "names no host" in error(env={"PBS_NODEFILE": str(nodes)}, status=1)
    for text in ("a b\n", "node[1-2]\n", "-x\n", "a\x07\n"):
        nodes.write_text(text)
        assert "is not a host name" in error(env={"PBS_NODEFILE": str(nodes)})


@pytest.mark.skipif(os.getuid() != 0, reason="a file of another user needs root")
def test_node_file_of_someone_else():
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        nodes = pathlib.Path(name, "nodes")
        nodes.touch(0o400)
        shutil.copy(GET_MASTER, name)
        error(env={"PBS_NODEFILE": str(nodes)}, status=1, executable=f"{name}/get-master", user=65534, group=65534, extra_groups=[])


def test_sourced_it_defines_functions_and_changes_nothing():
    program = f'''
        . "{GET_MASTER}"; before="$-:$IFS"
        first_of_hostlist "a[1-2]"; echo "$? $first_host [$first_host_error]"
        first_of_hostlist "a["; echo "$? $first_host [${{first_host_error%% at*}}]"
        [ "$before" = "$-:$IFS" ] && echo same
        set -f; first_of_hostlist x; case $- in *f*) echo still;; esac
        '''
    done = subprocess.run(["bash", "-uc", program], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["0 a1 []", "2  [this is not a valid host list, see character 2: \\[]", "same", "still"]


@pytest.mark.parametrize("hostlist,count", [
    ("nid1", 1), ("nid[1]", 1), ("nid1,nid2", 2), ("nid[001-004]", 4), ("nid[08-11,20],a", 6), ("a,b,nid[1-2],c,d", 6),
    ("rack[1-2]node[01-16]", 32), ("rack[1-2]node[01-16],x[1,3]-hsn,y", 35),
])
def test_how_many_hosts(hostlist, count):
    program = f'. "{GET_MASTER}"; first_of_hostlist "{hostlist}" count && echo $host_count'
    assert subprocess.check_output(["bash", "-uc", program], text=True) == f"{count}\n"


@pytest.mark.parametrize("form", ["range", "single"])
def test_ten_thousand_hosts(form):
    numbers = "0000-0099" if form == "range" else ",".join("%04d" % number for number in range(100))
    hostlist = ",".join("rack%02dnode[%s]" % (rack, numbers) for rack in range(100))
    assert first(hostlist) == "rack00node0000" 
    before = hostlist.rindex("]")
    assert "see character" in error(hostlist[:before])
