# SPDX-License-Identifier: GPL-2.0-only
"""The runscripts: which rank a process is under every launcher, and what it is given.

Every test starts the real script in an environment of its own (no variable of the machine's leaks in) with a
stand-in `python` that writes its environment as JSON. Where a real launcher is installed, it is used as well.
"""

import hashlib
import itertools
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys

import pytest
import testbed
from slingtorch.job import machine
from testbed import messages
from testbed.expected import expected

RUNSCRIPTS = pathlib.Path(__file__).resolve().parents[2] / "runscripts"
NAMES = ("conda-python-distributed", "conda-python-simple", "get-master")
LIBRARY = sorted(f"lib/{path.name}" for path in (RUNSCRIPTS / "lib").iterdir() if path.is_file())
DUMP = "#!%s -IS\nimport json, os, sys\njson.dump({'env': dict(os.environ), 'argv': sys.argv[1:]}, sys.stdout)\n"
NOBODY = 65534
FIRST = "deg0001.hsn.de.hpc.ucar.edu"
NODE_FILE = f"{FIRST}\n" * 2 + "\ndeg0002.hsn.de.hpc.ucar.edu\n" * 2
TORCHRUN = {"TORCHELASTIC_RUN_ID": "7", "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
            "MASTER_ADDR": "node1", "MASTER_PORT": "41234", "GROUP_RANK": "1"}


class Job:
    """A directory with a stand-in `python`, a cache root, and ways to start a runscript there."""

    def __init__(self, directory):
        self.dir = directory
        self.bin = directory / "bin"
        self.caches = directory / "caches"
        self.bin.mkdir()
        self.caches.mkdir()
        self.python(DUMP % sys.executable)

    def python(self, text, name="python"):
        path = self.bin / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    def file(self, name, text):
        (self.dir / name).write_text(text)
        return self.dir / name

    def environment(self, env=()):
        base = {"PATH": f"{self.bin}:/usr/bin:/bin", "SLINGTORCH_CACHE_ROOT": str(self.caches), "TMPDIR": str(self.dir)}
        base.update(env)
        return {key: str(value) for key, value in base.items() if value is not None}

    def start(self, env=(), args=("train.py",), script="conda-python-distributed", prefix=(), where=RUNSCRIPTS, **more):
        """
        Start a script; names in `env` that begin with _ are what it reads of the machine: a path, or lines of the file

        FILE stands for a file of one host a line: two nodes with two ranks each. Grid Engine's lines have more words.
        """
        env = {key: self.file("nodes", NODE_FILE.replace("edu", f"edu{' 2 all.q@x UNDEFINED' * (key == 'PE_HOSTFILE')}"))
               if value == "FILE" else value for key, value in dict(env).items()}
        machine = {key: self.file(key[1:], value) if "\n" in str(value) else value
                   for key, value in env.items() if re.match("_[a-z]", key)}
        if machine:
            where = self.dir / f"machine-{len(list(self.dir.iterdir()))}"
            testbed.runscripts_of_another_machine(RUNSCRIPTS, where, machine)
        done = subprocess.run(
            [*prefix, str(where / script), *args],
            env=self.environment({key: value for key, value in env.items() if key not in machine}),
            capture_output=True, text=True, timeout=300, **more)
        messages.known(done.stderr, self.dir)
        return done

    def rank(self, env=(), **more):
        """Environment that python sees; the start must succeed without a word on stderr."""
        done = self.start(env, **more)
        assert (done.returncode, done.stderr) == (0, "")
        return json.loads(done.stdout)["env"]

    def error(self, env=(), status=1, **more):
        """The message of a start that must fail before python, in the form that every message has."""
        done = self.start(env, **more)
        script = more.get("script", "conda-python-distributed")
        assert done.returncode == status, done.stderr
        assert done.stdout == ""
        assert done.stderr.startswith(f"{script}: ") and done.stderr.count("\n") == 1, done.stderr
        return done.stderr


@pytest.fixture
def job(tmp_path):
    return Job(tmp_path)


CACHES = ("MIOPEN_USER_DB_PATH", "MIOPEN_CUSTOM_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")


def identity(env):
    return tuple(int(env[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))


def slurm(rank=0, tasks="2(x2)", nodes=None, step=0, job=4711, **more):
    """What srun gives a task, for tasks laid out in blocks as SLURM_STEP_TASKS_PER_NODE says."""
    counts = []
    for entry in tasks.split(","):
        count, times = re.match(r"(\d+)(?:\(x(\d+)\))?$", entry).groups()
        counts += [int(count)] * int(times or 1)
    nodes = nodes or f"nid[001-{len(counts):03d}]"
    node, local = 0, rank
    while local >= counts[node]:
        local -= counts[node]
        node += 1
    env = {"SLURM_JOB_ID": job, "SLURM_JOBID": job, "SLURM_STEP_ID": step, "SLURM_STEPID": step, "SLURM_PROCID": rank,
           "SLURM_LOCALID": local, "SLURM_NODEID": node, "SLURM_NTASKS": sum(counts), "SLURM_NPROCS": sum(counts),
           "SLURM_STEP_NUM_TASKS": sum(counts), "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_TASKS_PER_NODE": tasks,
           "SLURM_STEP_NODELIST": nodes, "SLURM_NODELIST": nodes, "SLURM_JOB_NODELIST": nodes,
           "SLURM_JOB_NUM_NODES": len(counts), "SLURM_NNODES": len(counts), "SLURMD_NODENAME": f"nid{node + 1:03d}",
           "SLURM_DISTRIBUTION": "block"}
    env.update(more)
    return {key: str(value) for key, value in env.items() if value is not None}


def pmi(rank, size, local, locals_):
    return {"PMI_RANK": str(rank), "PMI_SIZE": str(size), "PMI_LOCAL_RANK": str(local), "PMI_LOCAL_SIZE": str(locals_)}


def hydra(rank, size, local=None, locals_=None, **more):
    return {"PMI_RANK": str(rank), "PMI_SIZE": str(size), "PMI_FD": "6", "MPI_LOCALRANKID": str(rank if local is None else local),
            "MPI_LOCALNRANKS": str(locals_ or size), **more}


def ompi(rank, size, local=None, locals_=None, **more):
    return {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(size),
            "OMPI_COMM_WORLD_LOCAL_RANK": str(rank if local is None else local),
            "OMPI_COMM_WORLD_LOCAL_SIZE": str(locals_ or size), "PMIX_NAMESPACE": "2131492865", **more}


def pals(rank, size, local, locals_, **more):
    return {**pmi(rank, size, local, locals_), "PALS_RANKID": str(rank), "PALS_LOCAL_RANKID": str(local),
            "PALS_LOCAL_SIZE": str(locals_), "PALS_NODEID": str(rank // locals_),
            "PALS_APID": "6f1f2b6e-1b5c-4d0e-9e8a-0d6a4c1a77aa", "PBS_JOBID": "1234567.desched1", **more}


def torchrun_worker(rank, size, local, locals_):
    return {**TORCHRUN, "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(locals_)}


def flux_task(rank, size, local, locals_):
    return {"FLUX_TASK_RANK": str(rank), "FLUX_JOB_SIZE": str(size), "FLUX_TASK_LOCAL_ID": str(local),
            "FLUX_JOB_NNODES": str(size // locals_), "FLUX_JOB_ID": "own"}


def flux(name):
    """A record of Flux: (its table of hosts and tasks, the environment of every rank)."""
    table, ranks = (RUNSCRIPTS.parent / f"tests/records/flux/{name}.txt").read_text().split("\n\n")[1:]
    environments = [dict(entry.split("=", 1) for entry in line.split()[1:]) for line in ranks.splitlines()[1:]]
    return table.partition("\n")[2] + "\n", environments


def flux_command(job, table, job_id):
    """Flux's command as far as the runscript calls it: it prints what the real one printed for this job."""
    (job.dir / "taskmap").write_text(table)
    job.python(f'#!/bin/bash\n[[ $* == "job taskmap --to=hosts {job_id}" ]] && exec cat {job.dir}/taskmap\n', "flux")


def batch(**more):
    """What Slurm gives a batch script."""
    none = ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE")
    return slurm(0, "4", **{**dict.fromkeys(none), **more})


# ---------------------------------------------------------------------------------------------------- the files


@pytest.mark.parametrize("name", (*NAMES, *(name for name in LIBRARY if name.endswith(".bash"))))
def test_nothing_that_bash_4_2_lacks(name):
    text = re.sub(r"(?m)(^|\s)#.*$", "", (RUNSCRIPTS / name).read_text())
    newer = {"4.3 nameref": r"(local|declare) -n", "4.4 transformation": r"\$\{\w+@\w\}",
             "4.4 local -": r"local -(\s|$)", "4.4 mapfile -d": r"mapfile -d",
             "5.0 EPOCH": r"EPOCHREALTIME|EPOCHSECONDS", "4.3 wait -n": r"wait -n", "5.1 SRANDOM": r"SRANDOM",
             "4.3 negative index": r"\[-1\]"}
    assert [what for what, form in newer.items() if re.search(form, text)] == []
    assert not re.search(r"\beval\b|\bsleep\b|\bscontrol\b|\bhostname\b(?!['])",
                         text.replace("/proc/sys/kernel/hostname", ""))


# ------------------------------------------------------------------------------------------------ whole environments

SITE = {"SLINGTORCH_MULTINODE_NCCL_NET": "AWS Libfabric", "LD_LIBRARY_PATH": "DIR/plugin", "HOME": "DIR/home/me", "USER": "me"}
ALT_READ = {"FI_CXI_RDZV_PROTO": "alt_read", "FI_CXI_RDZV_THRESHOLD": "0", "FI_CXI_RDZV_GET_MIN": "0",
            "FI_CXI_RDZV_EAGER_SIZE": "0"}
STARTS_OF_ALL_KINDS = {  # name: environment, arguments
    "alone": ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "1"}, ()),
    "Slurm, one node": ({**slurm(1, "2", SLURM_CPUS_ON_NODE=128), **SITE, "SLINGTORCH_CACHE_ROOT": None,
                         "CUDA_VISIBLE_DEVICES": "0,1"}, ("-m", "train", "--lr", "1")),
    "Slurm, a node for each rank": ({**slurm(1, "1(x2)"), **SITE, "NCCL_NET": "Socket", "SLURM_CPUS_ON_NODE": "128",
                                     "CUDA_VISIBLE_DEVICES": "0,1", "SLINGTORCH_GPU_VISIBILITY": "CUDA_VISIBLE_DEVICES"}, ()),
    "Frontier": ({**slurm(5, "4(x2)", step=2), **SITE, **ALT_READ, "SLINGTORCH_GPU_VISIBILITY": "ROCR_VISIBLE_DEVICES",
                  "ROCR_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7", "HIP_VISIBLE_DEVICES": "4,5,6,7", "GPU_DEVICE_ORDINAL": "4,5,6,7",
                  "SLURM_CPUS_ON_NODE": "1024",
                  "SLURM_JOB_ACCOUNT": "ABC123", "SLINGTORCH_HF_HOME": "DIR/%a/%u/hf"}, ()),
    "Cirrus, Horovod": ({**slurm(0, "1"), **SITE, "HOROVOD_RANK": "3", "HOROVOD_SIZE": "4", "HOROVOD_LOCAL_RANK": "1",
                         "HOROVOD_LOCAL_SIZE": "2", "MASTER_ADDR": "r1i0n3", "SLINGTORCH_WORK_HOME": "DIR/home:DIR/work",
                         "TORCH_FR_DUMP_ON_TIMEOUT": "0"}, ()),
    "Derecho": ({**pals(5, 8, 1, 4, PBS_NODEFILE="DIR/nodes", PBS_JOBID="1234567[3].desched1"), **SITE, **ALT_READ,
                 "LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "0,1,2,3", "SLINGTORCH_GPU_VISIBILITY": "CUDA_VISIBLE_DEVICES"}, ()),
    "Open MPI in PBS": ({**ompi(3, 4, 1, 2, PBS_NODEFILE="DIR/nodes", PBS_JOBID="77.srv", TORCH_FR_BUFFER_SIZE="0")}, ()),
    "hydra in Slurm": ({**slurm(1, "1(x2)"), **hydra(3, 4, 1, 2), "TORCH_NCCL_TRACE_BUFFER_SIZE": "20000"}, ()),
    "Flux": ({"FLUX_TASK_RANK": "5", "FLUX_JOB_SIZE": "8", "FLUX_TASK_LOCAL_ID": "1", "FLUX_JOB_NNODES": "2",
              "FLUX_JOB_ID": "ƒA", "FLUX_JOB_ID_PATH": "/ƒB/ƒA", "MASTER_ADDR": "tuolumne1005",
              "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}, ()),
    "torchrun in Slurm": ({**slurm(1, "1(x2)"), **SITE, "TRITON_CACHE_DIR": "/mine", "TORCHELASTIC_RUN_ID": "7", "RANK": "5", "WORLD_SIZE": "8",
                           "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "node1", "MASTER_PORT": "65535"}, ()),
    "--torchrun": (slurm(1, "1(x2)", SLURM_GPUS_ON_NODE=8, ROCR_VISIBLE_DEVICES="0,1,2,3"), ("--torchrun", "train.py")),
    "--torchrun on one node": (slurm(0, "1", OMP_NUM_THREADS=3), ("--torchrun=2", "-m", "train")),
    "--check": (slurm(1, LOCAL_RANK=0), ("--check", "train.py", "--lr", "1")),
    "--check alone": (slurm(1, LOCAL_RANK=0, SLINGTORCH_FLIGHT_RECORDER="DIR/caches/"), ("--check",)),
    "--vet": (slurm(1, "1(x2)", SLINGTORCH_FLIGHT_RECORDER="off"), ("--vet", "--write", "x")),
    "--bench": (slurm(1, WITH_CONDA="source DIR/activate", TORCH_NCCL_DEBUG_INFO_TEMP_FILE="/mine"), ("--bench", "--json", "x")),
}


@pytest.fixture(scope="module")
def machine_of_the_environments(tmp_path_factory):
    """The runscripts on a machine whose cores, network and range of ports are known."""
    where = tmp_path_factory.mktemp("machine") / "runscripts"
    for name, text in (("status", "Cpus_allowed_list:\t0-15,64-127\n"), ("ports", "32768\t60999\n"), ("hosts", ""),
                       ("cxi/cxi0/device/properties/rdzv_get_en", "1\n")):
        (where.parent / name).parent.mkdir(parents=True, exist_ok=True)
        (where.parent / name).write_text(text)
    testbed.runscripts_of_another_machine(RUNSCRIPTS, where, {
        "_proc_status": where.parent / "status", "_cxi_devices": where.parent / "cxi", "_hosts": where.parent / "hosts",
        "_nvidia_gpus": where.parent})
    master = where / "lib/master.bash"
    master.write_text(master.read_text().replace("/proc/sys/net/ipv4/ip_local_port_range", str(where.parent / "ports")))
    return where


def test_whole_environments(job, machine_of_the_environments):
    """All that Python is given and the start had not, what it no longer has (-NAME), and its arguments."""
    job.python(DUMP % sys.executable + "print()\n")
    for name, content in (("nodes", "deg0001.hsn\ndeg0002.hsn\n"), ("plugin/librccl-net.so", ""), ("work/me/x", ""),
                          ("abc123/me/x", ""), ("home/me/.cache/huggingface/token", ""), ("activate", "export ACTIVE=$#\n")):
        (job.dir / name).parent.mkdir(parents=True, exist_ok=True)
        (job.dir / name).write_text(content)
    text = ""
    for name, (env, args) in STARTS_OF_ALL_KINDS.items():
        env = {key: value and value.replace("DIR", str(job.dir)) for key, value in env.items()}
        done = job.start(env, args or ("train.py",), where=machine_of_the_environments, cwd=job.dir)
        assert done.returncode == 0, (name, done.stderr)
        text += done.stderr
        before = {**dict.fromkeys(("SHLVL", "PWD", "OLDPWD", "_", "LC_CTYPE")), **job.environment(env)}
        for seen in map(json.loads, done.stdout.splitlines()):
            new = [f"{key}={value}" for key, value in sorted(seen["env"].items()) if before.get(key, "") not in (None, value)]
            words = " ".join([*new, *(f"-{key}" for key in sorted(set(job.environment(env)) - set(seen["env"])))])
            for value, word in [(machine_of_the_environments, "RUNSCRIPTS"), (f"{job.caches}/slingtorch-{os.getuid()}", "CACHES"),
                                (job.dir, "DIR"), (f"slingtorch-{os.getuid()}", "CACHES"), (socket.gethostname(), "HOST")]:
                words = words.replace(str(value), word)
            text += f"{name}: {words} python {' '.join(seen['argv'])}\n"
    assert not list(job.dir.glob("flight*")), "nothing is made in advance"
    expected(text, "environments", [(machine_of_the_environments, "RUNSCRIPTS")])


# ---------------------------------------------------------------------------------------------------- which rank

HAND = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "node1"}
SLURM_OF_TWO_NODES = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "nid[001-002]", "SLURM_TASKS_PER_NODE": "1(x2)"}
HOROVOD = {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2"}
NODE_ITSELF = ("localhost", "localhost.localdomain", "127.0.0.1", "127.0.1.1", "::1", "0.0.0.0")
PMIX = {"PMIX_RANK": "0", "PMIX_NAMESPACE": "slurm.pmix.1.0", "SLURM_MPI_TYPE": "pmix"}
PMI2 = {"PMI_FD": "11", "PMI_RANK": "0", "PMI_SIZE": "4", "SLURM_MPI_TYPE": "pmi2"}
UNEVEN = [(0, 1), (0, 2), (1, 2), (0, 2), (1, 2), (0, 1), (0, 1), (0, 1)]


@pytest.mark.parametrize("env, ranks, address", [
    # alone
    ({}, (0, 1, 0, 1), "127.0.0.1"),
    ({"RANK": "", "WORLD_SIZE": "", "MASTER_ADDR": "", "MASTER_PORT": ""}, (0, 1, 0, 1), "127.0.0.1"),
    ({"SHELLOPTS": "errexit:noglob"}, (0, 1, 0, 1), "127.0.0.1"),
    # Slurm
    *((slurm(rank, "1,2(x2),1(x3)"), (rank, 8, *local), "nid001") for rank, local in enumerate(UNEVEN)),
    (slurm(1, SHELLOPTS="braceexpand:errexit:nounset:noglob"), (1, 4, 1, 2), "nid001"),
    (slurm(1, "1(x2)", "nid[003-004]", SLURM_JOB_NODELIST="nid[001-004]", SLURM_NODELIST="nid[001-004]", SLURM_NTASKS="16",
           SLURM_TASKS_PER_NODE="4(x4)"), (1, 2, 0, 1), "nid003"),
    (slurm(2, **dict.fromkeys(("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS",
                               "SLURM_STEP_TASKS_PER_NODE", "SLURM_DISTRIBUTION"))), (2, 4, 0, 2), "nid001"),
    *((batch(SLURM_STEP_ID=step, SLURM_STEPID=step, SLURM_NTASKS=1), (0, 1, 0, 1), "127.0.0.1")
      for step in (None, 4294967291, 4294967290)),
    (slurm(1, SLURM_ARBITRARY_NODELIST="nid009,nid001"), (1, 4, 1, 2), "nid001"),
    (slurm(1, SLURM_ARBITRARY_NODELIST="nid009,nid009,nid001,nid001", SLURM_DISTRIBUTION="arbitrary"), (1, 4, 1, 2), "nid009"),
    (slurm(1, SLURM_HOSTFILE="FILE", SLURM_DISTRIBUTION="arbitrary"), (1, 4, 1, 2), FIRST),
    # what agrees with Slurm is kept; LOCAL_RANK: one GPU bound to each task
    (slurm(3, RANK=3, WORLD_SIZE=4), (3, 4, 1, 2), "nid001"), (slurm(3, WORLD_SIZE=4), (3, 4, 1, 2), "nid001"),
    (slurm(3, LOCAL_RANK=0), (3, 4, 0, 2), "nid001"), (slurm(1, LOCAL_WORLD_SIZE=8), (1, 4, 1, 8), "nid001"),
    # MPI inside Slurm: a batch script, srun --pty bash, a step of daemons, srun of a Cray, whose PALS_RANKID all have
    *(({**batch(), **hydra(rank, 4)}, (rank, 4, rank, 4), "127.0.0.1") for rank in (0, 3)),
    ({**slurm(0, "1", "nid001", SLURM_NTASKS=4), **hydra(2, 4)}, (2, 4, 2, 4), "127.0.0.1"),
    *(({**slurm(1, "1(x2)"), **hydra(rank, 4, rank % 2, 2)}, (rank, 4, rank % 2, 2), "nid001") for rank in (0, 3)),
    *(({**slurm(0, "1", "nid001", PALS_RANKID=0, PALS_APID="4711.0"), **hydra(rank, 2)}, (rank, 2, rank, 2), "127.0.0.1")
      for rank in (0, 1)),
    *(({**slurm(0, "1", "nid002", SLURM_JOB_NODELIST=job, SLURM_NODELIST=step), **ompi(2, 4, 0, 2)}, (2, 4, 0, 2), "nid001")
      for job, step in (("nid[001-002]", "nid002"), ("nid[001-002]", "nid[001-002]"), ("nid002", "nid[001-002]"))),
    # a node file, by three batch systems
    *(({name: "FILE", **launcher}, (3, 4, 1, 2), FIRST)
      for name in ("LSB_DJOB_HOSTFILE", "PE_HOSTFILE", "PBS_NODEFILE")
      for launcher in (ompi(3, 4, 1, 2), hydra(3, 4, 1, 2), pmi(3, 4, 1, 2))),
    (pals(5, 8, 1, 4, PBS_NODEFILE="FILE", PALS_LOCAL_RANKID="", PALS_LOCAL_SIZE=""), (5, 8, 1, 4), FIRST),
    *(({**env, "MASTER_ADDR": "node1"}, (3, 4, 1, 2), "node1") for env in (hydra(3, 4, 1, 2), ompi(3, 4, 1, 2))),
    # Horovod, whose variables do not count in a task of several; torchrun; all by hand
    (HOROVOD, (1, 2, 1, 2), "127.0.0.1"), ({**slurm(0, "1"), **HOROVOD}, (1, 2, 1, 2), "127.0.0.1"),
    (slurm(3, **HOROVOD), (3, 4, 1, 2), "nid001"),
    *(({**outer, **TORCHRUN}, (5, 8, 1, 4), "node1")
      for outer in ({}, slurm(1, "1(x2)"), hydra(1, 2), ompi(0, 1), pals(0, 2, 0, 1))),
    *((slurm(3, MASTER_ADDR=address), (3, 4, 1, 2), address)
      for address in ("node1", "10.1.2.3", "fe80::1", "fd00::1", "node_1.cluster", "fe80::1%hsn0")),
    *((slurm(0, "4", "nid001", MASTER_ADDR=address), (0, 4, 0, 4), address) for address in NODE_ITSELF),
    # SLINGTORCH_MPI fits, or is not used: nothing is asked, one rank, Horovod does without
    *((slurm(**env), (0, 4, 0, 2), "nid001") for env in (
        {**PMIX, "SLINGTORCH_MPI": "openmpi"}, {**PMI2, "SLINGTORCH_MPI": "mpich"}, {"SLINGTORCH_MPI": ""},
        {"SLINGTORCH_MPI": "openmpi", "HOROVOD_CONTROLLER": "gloo"})),
    (slurm(tasks="1", SLINGTORCH_MPI="openmpi"), (0, 1, 0, 1), "127.0.0.1"),
    ({**HAND, "SLINGTORCH_MPI": "openmpi"}, (5, 8, 1, 4), "node1"),
    (HAND, (5, 8, 1, 4), "node1"), ({**HAND, **slurm(0, "1", "nid001")}, (5, 8, 1, 4), "node1"),
    ({**HAND, "RANK": "3", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": None}, (3, 8, 1, 8), "127.0.0.1"),
], ids=str)
def test_rank(job, env, ranks, address):
    found = job.rank(env)
    assert (identity(found), found["MASTER_ADDR"]) == (ranks, address)


@pytest.mark.parametrize("env, words", [
    # Slurm's variables, damaged
    (slurm(3, SLURM_STEP_TASKS_PER_NODE="2(y2)"), "'2(y2)' is not TASKS or TASKS(xNODES)"),
    (slurm(3, SLURM_STEP_TASKS_PER_NODE="2"), "SLURM_NODEID is 1"),
    (slurm(3, SLURM_STEP_TASKS_PER_NODE="4(x2)"), "has 8 tasks, but the step has 4"),
    (slurm(3, SLURM_STEP_NODELIST="nid[1-"), "SLURM_STEP_NODELIST: this is not a valid host list, see character 4: \\[1-"),
    (slurm(3, SLURM_STEP_NODELIST=None), "SLURM_STEP_NODELIST is not set"),
    (slurm(3, SLURM_STEP_NODELIST="nid001"), "SLURM_STEP_NODELIST has 1 host(s), but the tasks of the step are on 2"),
    (slurm(3, SLURM_STEP_NODELIST="nid[001-003]"), "has 3 host(s), but the tasks of the step are on 2 nodes"),
    (slurm(3, SLURM_PROCID="x"), "no valid rank for this process: 'x'"),
    (slurm(3, SLURM_LOCALID=None), "gives no valid local_rank"),
    (slurm(3, SLURM_STEP_NUM_TASKS=None, SLURM_NTASKS=None, SLURM_NPROCS=None), "SLURM_STEP_NUM_TASKS"),
    (slurm(3, SLURM_STEP_TASKS_PER_NODE=None, SLURM_TASKS_PER_NODE=None), "SLURM_STEP_TASKS_PER_NODE is not set"),
    (slurm(1, SLURM_DISTRIBUTION="arbitrary"), "no variable holds that list"),
    (slurm(1, SLURM_DISTRIBUTION="arbitrary", SLURM_HOSTFILE="/nowhere"), "the node file '/nowhere' does not exist"),
    *((batch(SLURM_STEP_ID=step, SLURM_STEPID=step), "has 4 tasks") for step in (None, 4294967291, 4294967290)),
    # variables that contradict each other
    ({"WORLD_SIZE": "8"}, "RANK='' and WORLD_SIZE='8'"), ({"RANK": "0"}, "RANK='0' and WORLD_SIZE=''"),
    ({**slurm(0, "1", "nid001"), "WORLD_SIZE": "8"}, "WORLD_SIZE='8' contradict the launcher (slurm), which started"),
    (slurm(3, RANK=0, WORLD_SIZE=4), "(slurm), which started this process as rank 3 of 4"),
    (slurm(0, RANK=0, WORLD_SIZE=8), "rank 0 of 4"), ({**hydra(1, 2), "RANK": "0"}, "rank 1 of 2"),
    ({**ompi(1, 2), "WORLD_SIZE": "3"}, "rank 1 of 2"),
    *(({"RANK": rank, "WORLD_SIZE": "9", "LC_ALL": "C.UTF-8"}, f"RANK='{rank}' is not a whole number")
      for rank in ("x", "-1", "08", "a[$(touch /tmp/never)]", "\u0663")),
    ({"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, "rank=2 is not below world_size=2"),
    ({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, "local_rank=2 is not below"),
    (slurm(1, LOCAL_RANK=5), "LOCAL_RANK=5 is not below LOCAL_WORLD_SIZE=2"), ({"LOCAL_RANK": "1"}, "LOCAL_RANK=1 is not below"),
    ({**TORCHRUN, "LOCAL_RANK": "4"}, "local_rank=4 is not below"), (hydra(4, 4, 0, 4), "rank=4 is not below"),
    (hydra(0, 2, 0, 4), "4 ranks on this node, but only 2 in total"),
    # half of what a launcher sets, or the user
    *(({name: "1"}, f"{name}=1, but how many ranks there are") for name in (
        "PMIX_RANK", "JSM_NAMESPACE_RANK", "ALPS_APP_PE", "MV2_COMM_WORLD_RANK", "PMI_ID", "MPT_MPI_RANK", "SLURM_PROCID",
        "FLUX_TASK_RANK", "MPI_LOCALRANKID", "PMI_SIZE", "MPIRUN_RANK", "MPI_RANKID")),
    ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, "this Slurm job has 2 tasks"),
    ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, "(LOCAL_WORLD_SIZE='2'): some are missing"),
    ({"FLUX_URI": "local:///run/flux/local"}, "FLUX_URI is set, but 'flux getattr size' does not give"),
    ({**HOROVOD, "HOROVOD_LOCAL_RANK": "0", "HOROVOD_LOCAL_SIZE": "1"}, "the host of rank 0 is unknown: MASTER_ADDR is not set"),
    ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "(pmi) gives no valid local_rank"), ({"PALS_RANKID": "0"}, "for this process: '' ("),
    (hydra(3, 4, 1, 2), "Export MASTER_ADDR=<host of rank 0>"), (ompi(3, 4, 1, 2), "Export MASTER_ADDR=<host of rank 0>"),
    ({**HAND, "LOCAL_RANK": None}, "LOCAL_RANK=''"), ({**HAND, "LOCAL_WORLD_SIZE": None}, "LOCAL_WORLD_SIZE=''"),
    ({**HAND, "MASTER_ADDR": None}, "MASTER_ADDR is not"),
    ({"_proc_cgroup": "0::/system.slice/slurmstepd.scope/job_4711/step_0/user/task_1\n"},
     "one of several ranks, without their variables"),
    # places and values of the user
    *((slurm(3, MASTER_PORT=port), f"MASTER_PORT='{port}' is not a port")
      for port in ("0", "65536", "http", "-1", "99999999999999999999")),
    *((slurm(3, MASTER_ADDR=address), "Put only the host there, the port in MASTER_PORT") for address in (
        "node1:29401", "tcp://node1", "[::1]:29500", "a b", "a\n", "-x", "--help", ".", "node1,node2", "$(hostname)")),
    *((slurm(rank, MASTER_ADDR=address), f"MASTER_ADDR={address} means each node itself") for rank in (0, 3)
      for address in NODE_ITSELF),
    *((slurm(1, SLINGTORCH_GPU_VISIBILITY=name), "is not one of ROCR_VISIBLE_DEVICES, CUDA")
      for name in ("PATH", "LD_PRELOAD", "a[$(id)]", "CUDA_VISIBLE_DEVICES ", "ZE_AFFINITY_MASK, GPU_DEVICE_ORDINAL")),
    *((slurm(0, SLINGTORCH_FLIGHT_RECORDER=path), f"SLINGTORCH_FLIGHT_RECORDER='{path}' is not the absolute path")
      for path in ("caches", "/none")),
    ({"SLINGTORCH_CACHE_ROOT": "/nowhere/at/all"}, "is not a directory on this node"),
    ({"SLINGTORCH_CACHE_ROOT": "caches"}, "is not an absolute path"),
    ({**slurm(), "HOME": "/home/me", "SLINGTORCH_WORK_HOME": "/work"}, "does not have the form /home:/work"),
    ({"SLINGTORCH_MPI": "yes"}, "not one of auto, openmpi, mpich"),
], ids=str)
def test_refused(job, env, words):
    assert words in job.error(env)


# ---------------------------------------------------------------------------------------------------- one rank


def test_arguments_arrive_unchanged(job):
    args = ("-u", "a b", "", "*", "$HOME", "--x=`id`", "ü")
    assert json.loads(job.start(args=args).stdout)["argv"] == list(args)
    assert json.loads(job.start(args=args, script="conda-python-simple").stdout)["argv"] == list(args)


def test_path_with_spaces_and_relative_and_by_path(job, tmp_path):
    where = tmp_path / "a dir with spaces"
    shutil.copytree(str(RUNSCRIPTS), str(where))
    assert identity(job.rank(slurm(3), where=where)) == (3, 4, 1, 2)
    for directory, command in ((where, ["./conda-python-distributed"]), (where, ["bash", "conda-python-distributed"]),
                               (tmp_path, ["conda-python-distributed"])):
        env = job.environment({"PATH": f"{job.bin}:{where}:/usr/bin:/bin"})
        done = subprocess.run(command + ["x"], cwd=directory, env=env, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), command


# the start that needs each file
MISSING = {**dict.fromkeys(["conda-python-simple", "lib/ranks.bash", "lib/master.bash", "lib/caches.bash", "lib/recorder.bash",
                            "lib/facts.bash", "lib/gpus.bash", "lib/threads.bash", "lib/network.bash", "lib/alone.bash"], {}),
           "get-master": slurm(3), "lib/flux.bash": flux("block")[1][0], "lib/leftovers.bash": ompi(1, 2),
           "lib/home.bash": {"SLINGTORCH_HF_HOME": "/x"}, "lib/mpi.bash": slurm(0), "lib/pals.bash": {"PALS_RANKID": "0",
           "PALS_APINFO": "/x"}, "lib/stage.bash --stage": {}, "lib/torchrun.bash --torchrun": {}, "lib/check.bash --check": {},
           "lib/job --check": {}}


@pytest.mark.parametrize("missing", MISSING)
def test_incomplete_copy_is_said(job, missing):
    name, *args = missing.split()
    where = job.dir / "half"
    shutil.copytree(RUNSCRIPTS, where)
    (where / name).rename(job.dir / "gone")
    assert f"{where / name} is missing" in job.error(MISSING[missing], args=[*args, "train.py"], where=where)


def test_damaged_copy_is_said(job):
    where = job.dir / "half"
    shutil.copytree(RUNSCRIPTS, where)
    (where / "lib/caches.bash").write_text("_make_caches() {\n")
    done = job.start(slurm(1), where=where)
    assert done.returncode == 1 and "unexpected end of file" in done.stderr
    assert "caches.bash is missing or not readable; keep all runscripts together" in done.stderr


# ---------------------------------------------------------------------------------------------------- PALS


def apinfo(nodes, ranks_per_node, first=0, version=5, cyclic=False, profiles=2, **wrong):
    """
    A table of PALS as its header files describe it (runscripts/lib/pals.bash): header, profiles, command, ranks, nodes.

    :param wrong: values of fields of the header, by their number as 'field9'
    """
    header, profile, command, pe, node = {1: 17, 5: 20}.get(version, 20) * 8, {1: 52}.get(version, 36), 12, 12, 68
    size = len(nodes) * ranks_per_node
    at = [header, header + profile * profiles, header + profile * profiles + command]
    at.append(at[2] + pe * size)
    end = at[3] + node * len(nodes)
    fields = [version, end, profile, at[0], profiles, command, at[1], 1, pe, at[2], size, node, at[3], len(nodes), 112, end, 0]
    for name, value in wrong.items():
        fields[int(name[5:])] = value
    # the compiler may leave anything in the four bytes after an int
    data = b"".join(struct.pack("<Q", value) for value in fields).ljust(header, b"\0")
    data = data[:4] + b"\xfe\xca\xad\xde" + data[8:] + b"\xff" * profile * profiles
    data += struct.pack("<3i", size, ranks_per_node, 1)
    for rank in range(size):
        where, local = (rank % len(nodes), rank // len(nodes)) if cyclic else divmod(rank, ranks_per_node)
        data += struct.pack("<3i", local, 0, (where + first) % len(nodes))
    for number, name in enumerate(nodes):
        data += struct.pack("<i64s", number + 200, name.encode())
    return data


@pytest.mark.parametrize("version", [1, 5])
def test_pals_finds_rank_0_in_its_own_table_where_the_node_file_is_not(job, version):
    table = job.dir / "apinfo"
    for nodes, ranks_per_node, more, host in (
        (["deg0007", "deg0009"], 4, {}, "deg0007"), (["deg0007", "deg0009"], 4, {"first": 1}, "deg0009"),
        (["deg0007", "deg0009"], 4, {"first": 1, "cyclic": True, "profiles": 0}, "deg0009"),
        (["deg0007", "deg0009"], 4, {"profiles": 200}, "deg0007"),
        (["n%04d" % number for number in range(10000)], 1, {"first": 9999}, "n9999"), (["x" * 63, "b"], 4, {}, "x" * 63),
    ):
        table.write_bytes(apinfo(nodes, ranks_per_node, version=version, **more))
        env = pals(5, len(nodes) * ranks_per_node, 1, 4, PALS_APINFO=table, PBS_NODEFILE="/only/on/the/first/node")
        assert job.rank(env)["MASTER_ADDR"] == host
        done = job.start(env, args=(), script="get-master")
        assert (done.stdout, done.stderr) == (f"{host}\n", "")
    arbitrary = slurm(1, "4(x2)", SLURM_DISTRIBUTION="arbitrary", PALS_APINFO=table)
    assert job.rank(arbitrary)["MASTER_ADDR"] == host


@pytest.mark.parametrize("data,words", [
    (b"", "ends within its header"),
    (b"short", "ends within its header"),
    (apinfo(["a", "b"], 4, version=0), "has format version 0"),
    (apinfo(["a", "b"], 4, version=6), "has format version 6, but only 1 and 5 are known"),
    (apinfo(["a", "b"], 3), "is for a start of 6 ranks, but this one has 8"),
    (apinfo(["a;b", "c"], 4), "no host name for node 0, but: a\\;b"),
    (apinfo(["", ""], 4), "no host name for node 0"),
    (apinfo(["x" * 64, "b"], 4), "no host name for node 0"),  # a name without end
    (apinfo(["a", "b"], 4)[:100], "ends within its header"),
    (apinfo(["a", "b"], 4)[:250], "ends before its ranks"),
    (apinfo(["a", "b"], 4)[:360], "ends before the name of node 0"),
    (apinfo(["a", "b"], 4, field9=1 << 30), "ends before its ranks, which should be at 1073741824"),
    (apinfo(["a", "b"], 4, field12=1 << 30), "ends before the name of node 0"),
    (apinfo(["a", "b"], 4, field8=4), "is damaged: ranks of 4 bytes"),
    (apinfo(["a", "b"], 4, field11=0), "is damaged"),
    (apinfo(["a", "b"], 4, first=1, field13=1), "puts rank 0 on node 1 of 1"),
    (None, "cannot be read"),
])
def test_pals_table_of_another_form_is_not_believed(job, data, words):
    table = job.dir / "apinfo"
    if data is not None:
        table.write_bytes(data)
    env = pals(5, 8, 1, 4, PALS_APINFO=table, PBS_NODEFILE="FILE")
    assert job.rank(env)["MASTER_ADDR"] == FIRST
    assert job.start(env, args=(), script="get-master").stdout == f"{FIRST}\n"
    for nodes in ("/nowhere/nodes", ""):
        assert words in job.error({**env, "PBS_NODEFILE": nodes})
    assert words in job.start({**env, "PBS_NODEFILE": ""}, args=(), script="get-master").stderr


# where the ranks of tests/records/pals are, by node: what srun was asked for
LAYOUTS = {"block": ["nid000009"] * 2 + ["nid000010"] * 2 + ["nid000011"] * 2 + ["nid000012"] * 2,
           "cyclic": ["nid000009", "nid000010", "nid000011", "nid000012"] * 2,
           "two-nodes-uneven": ["nid000009"] * 3 + ["nid000010"],
           "arbitrary": ["nid000011", "nid000009", "nid000012", "nid000010"]}


@pytest.mark.parametrize("table", sorted((RUNSCRIPTS.parent / "tests/records/pals").glob("*.apinfo")), ids=lambda path: path.stem)
def test_table_that_slurm_wrote(job, table):
    """srun of Slurm 22.05 exports PALS_RANKID alone, and PALS on Aurora no PMI_*: the table has the rest."""
    nodes = LAYOUTS[table.stem.split("-", 2)[2]]
    for rank, node in enumerate(nodes):
        env = job.rank({"PALS_RANKID": str(rank), "PALS_APID": "1.0", "PALS_APINFO": str(table)})
        assert identity(env) == (rank, len(nodes), nodes[:rank].count(node), nodes.count(node))
        assert env["MASTER_ADDR"] == nodes[0]


def test_what_neither_variables_nor_table_say(job):
    table = job.dir / "apinfo"
    table.write_bytes(apinfo(["a", "b"], 2))
    aurora = {"PALS_RANKID": "3", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "2", "PMIX_RANK": "3", "PALS_APINFO": table}
    assert identity(job.rank(aurora)) == (3, 4, 1, 2)
    data = apinfo(["a", "b"], 4)
    ranks = struct.unpack_from("<Q", data, 9 * 8)[0]
    alone = {"PALS_RANKID": "1", "PALS_APID": "1.0", "PALS_APINFO": table}
    for env, content, words in [
        *(({**aurora, "PALS_RANKID": rank}, table.read_bytes(), f"has no rank {rank}") for rank in ("4", "x")),
        (aurora, apinfo(["a", "b"], 2, version=6), "has format version 6"),
        (alone, b"", "its header"), (alone, data[:100], "its header"),
        (alone, data[:ranks], "ends before rank 1, which should be at"),
        (alone, data[:ranks + 8 * 12 - 12], "ends before the last of its 8 ranks"),
        *(({**alone, "PALS_RANKID": "7"}, apinfo(["a", "b"], 4, **wrong), words) for wrong, words in (
            ({"field13": 1}, "puts rank 7 on node 1 of 1"), ({"field8": 14}, "is damaged: ranks of 14 bytes"),
            ({"field9": (1 << 32) + ranks}, "ends before"), ({"field8": (1 << 32) + 12}, "is damaged"))),
    ]:
        table.write_bytes(content)
        assert words in job.error(env)


@pytest.mark.parametrize("launcher", [("mpiexec.hydra", "-n", "4"), ("mpirun.openmpi", "--oversubscribe", "-n", "4")])
def test_real_launcher(job, launcher):
    """Also behind a container runtime that does not become the program: the ranks' parents differ, their proxy does not."""
    assert shutil.which(launcher[0]), f"{launcher[0]} is not installed: apt-get install mpich openmpi-bin"
    # a file for each rank: launchers forward standard output in pieces, which mix
    job.python(f"#!{sys.executable}\nimport json, os\njson.dump(dict(os.environ), open(os.environ['RANK'], 'w'))\n")
    env = job.environment({"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"})
    ports = []
    for between in ((), ("sh", "-c", '"$@"; exit $?', "sh")):
        command = [*launcher, *between, str(RUNSCRIPTS / "conda-python-distributed"), "x"]
        subprocess.run(command, env=env, cwd=job.dir, check=True, timeout=300)
        ranks = [json.loads((job.dir / str(rank)).read_text()) for rank in range(4)]
        assert [identity(env) for env in ranks] == [(rank, 4, rank, 4) for rank in range(4)]
        ports += {env["MASTER_PORT"] for env in ranks}
    assert len({*ports, "29500"}) == 3, "one for each start"


# ------------------------------------------------------------------------------------------------------------- Flux


@pytest.mark.parametrize("name", ["one-node", "block", "uneven", "cyclic"])
def test_ranks_of_flux(job, name):
    """As Flux has distributed them; all agree on the port, and Flux's own PMI variables contradict nothing."""
    table, ranks = flux(name)
    flux_command(job, table, ranks[0]["FLUX_JOB_ID"])
    nodes = [[rank for part in line.partition(": ")[2].split(",")
              for rank in range(int(part.split("-")[0]), int(part.split("-")[-1]) + 1)] for line in table.splitlines()]
    assert sorted(sum(nodes, [])) == list(range(len(ranks)))
    # another host for every node: both brokers of the record were on one machine
    (job.dir / "taskmap").write_text("".join(f"tuolumne{1005 + number}: {line.partition(': ')[2]}\n"
                                             for number, line in enumerate(table.splitlines())))
    seen = [job.rank(env) for env in ranks]
    for rank, env in enumerate(seen):
        own = next(node for node in nodes if rank in node)
        assert identity(env) == (rank, len(ranks), own.index(rank), len(own))
        assert env["MASTER_ADDR"] == ("tuolumne1005" if len(nodes) > 1 else "127.0.0.1")
        assert f"/_{ranks[0]['FLUX_JOB_ID'].replace('ƒ', 'f')}-" in env["TRITON_CACHE_DIR"]
    assert len({env["MASTER_PORT"] for env in seen}) == 1
    # in the ASCII form of the same number, which Flux writes where the locale is not UTF-8
    plain = {key: value.replace("ƒ", "f") for key, value in ranks[0].items()}
    flux_command(job, table, plain["FLUX_JOB_ID"])
    for locale in ({}, {"LC_ALL": "C.UTF-8"}):
        assert job.rank({**plain, **locale, "MASTER_ADDR": "h"})["MASTER_PORT"] == seen[0]["MASTER_PORT"]
    other = {**ranks[0], "FLUX_JOB_ID": None, "FLUX_JOB_ID_PATH": "/ƒ2iMesPN", "FLUX_JOB_NNODES": "1"}
    assert job.rank(other)["MASTER_PORT"] != seen[0]["MASTER_PORT"]


def test_flux_that_cannot_be_asked(job):
    """As in a container: an even distribution is counted, another one is found out by some rank."""
    _, ranks = flux("block")
    assert identity(job.rank({**ranks[5], "MASTER_ADDR": "tuolumne1005"})) == (5, 8, 1, 4)
    message = job.error(ranks[5])
    assert "(launcher: flux)" in message and "export MASTER_ADDR=$(flux hostlist -n 0 local)" in message
    uneven = {**ranks[5], "FLUX_TASK_RANK": "5", "FLUX_TASK_LOCAL_ID": "4", "MASTER_ADDR": "tuolumne1005"}
    assert "local_rank=4 is not below local_world_size=4 (from: flux)" in job.error(uneven)
    assert "the 5 ranks are distributed over 2 nodes" in job.error({**flux("uneven")[1][3], "MASTER_ADDR": "tuolumne1005"})
    job.python("#!/bin/sh\necho flux-job: no such job >&2; exit 1\n", "flux")
    assert "failed: flux-job: no such job. Make it available" in job.error(flux("uneven")[1][3])
    for table in ("tuolumne1005 0-3\n", "$(touch never): 0-7\n", ""):
        flux_command(job, table, ranks[5]["FLUX_JOB_ID"])
        assert "not HOST: TASKS" in job.error(ranks[5])
    assert "FLUX_JOB_NNODES='x'" in job.error({**ranks[5], "FLUX_JOB_NNODES": "x"})


def test_flux_outside_others(job):
    """Flux that starts mpirun, and cray-pals, whose variables Flux sets besides its own."""
    _, ranks = flux("one-node")
    assert identity(job.rank({**ranks[0], **ompi(2, 4)})) == (2, 4, 2, 4)
    assert identity(job.rank({**ranks[3], **pals(3, 4, 3, 4, PBS_JOBID=None), "FLUX_JOB_NNODES": "2"})) == (3, 4, 3, 4)


# ---------------------------------------------------------------------------------------- leftovers of an outer start

OF_OTHERS = {"openmpi": ompi, "hydra": hydra, "pmi": pmi, "pals": pals, "flux": flux_task, "torchrun": torchrun_worker}
LEFT = {"slurm": lambda size: slurm(0, str(size), "login1"),
        **{name: lambda size, start=start: start(0, size, 0, size) for name, start in OF_OTHERS.items()}}
STARTS = {  # of rank RANK of 4, on two nodes
    "slurm": slurm,
    "slurm-pmi2": lambda rank: slurm(rank, PMI_RANK=rank, PMI_SIZE=4, PMI_FD=9),
    "slurm-cray": lambda rank: slurm(rank, PALS_RANKID=rank, PALS_APID="4711.0"),
    **{name: lambda rank, start=start: {**start(rank, 4, rank % 2, 2), "MASTER_ADDR": "nid001"}
       for name, start in OF_OTHERS.items()}}
# the process that Slurm starts is the runscript, or one in front of it
TASK = "export SLURM_TASK_PID=$$; exec "
AS_TASK = {"direct": TASK + '"$@"', "wrapped": TASK + "bash -c '\"$@\"; exit $?' - \"$@\""}


def start_inside(job, left, inner, form="direct"):
    """The start of a launcher in an environment that has `left`; that of the launcher itself is left's, too."""
    if "SLURM_PROCID" in inner:
        return job.start({**left, **inner}, prefix=["bash", "-c", AS_TASK[form], "-"])
    own = [f"{name}={value}" for name, value in inner.items()]
    wrap = ["bash", "-c", '"$@"; exit $?', "-"]
    return job.start(left, prefix=[*wrap, "env", *own, *(wrap if form == "wrapped" else [])])


# each pair once, with sizes and forms by turns
@pytest.mark.parametrize("inner, outer, size, form", [
    (*pair, (1, 4, 8)[number % 3], ("direct", "wrapped")[number % 2])
    for number, pair in enumerate(itertools.product(STARTS, LEFT))
    # srun's own PMI variables look the same, where rank and size agree
    if pair != ("pmi", "slurm")])
def test_the_innermost_launcher_wins(job, inner, outer, size, form):
    for rank in (0, 3):
        done = start_inside(job, LEFT[outer](size), STARTS[inner](rank), form)
        assert done.returncode == 0, done.stderr
        env = json.loads(done.stdout)["env"]
        assert identity(env) == (rank, 4, rank % 2, 2) and env["MASTER_ADDR"] == "nid001"
        assert rank == 0 or not done.stderr


@pytest.mark.parametrize("inner", [inner for inner in STARTS if inner != "torchrun"])
def test_ranks_exported_by_hand_that_contradict_the_launcher_are_an_error(job, inner):
    """torchrun sets RANK and WORLD_SIZE again."""
    message = job.error({**STARTS[inner](3), "RANK": "0", "WORLD_SIZE": "1"})
    assert "RANK='0' WORLD_SIZE='1' contradict the launcher" in message and "rank 3 of 4" in message


def test_each_row_of_the_table_is_started_and_left_over():
    program = '. lib/ranks.bash; for row in "${_launchers[@]}"; do echo ${row%% *}; done'
    rows = subprocess.run(["bash", "-euc", program], cwd=RUNSCRIPTS, stdout=subprocess.PIPE, check=True, text=True)
    rows = rows.stdout.split()
    set_alike = {"horovod", "manual"}
    assert {name.partition("-")[0] for name in STARTS} | set_alike == set(rows) == {*LEFT, *set_alike}


def test_leftovers_are_named_once_and_not_handed_on(job):
    done = start_inside(job, ompi(0, 1), slurm(0))
    assert "OMPI_COMM_WORLD_RANK=0 and OMPI_COMM_WORLD_SIZE=1 (openmpi) are left over" in done.stderr
    assert not [name for name in json.loads(done.stdout)["env"] if name.startswith("OMPI_COMM_WORLD")]
    env = json.loads(start_inside(job, LEFT["torchrun"](1), slurm(3)).stdout)["env"]
    assert "TORCHELASTIC_RUN_ID" not in env and env["MASTER_PORT"] == job.rank(slurm(0))["MASTER_PORT"]


@pytest.mark.parametrize("inner", ["slurm", "hydra", "pals"])
def test_contradiction_that_nothing_settles_is_an_error(job, inner):
    """The processes in front cannot be read, or had neither."""
    message = job.error({**STARTS[inner](3), **ompi(0, 1)})
    assert "OMPI_COMM_WORLD_SIZE=1 (openmpi)" in message and "one of 4" in message and "unset" in message


@pytest.mark.parametrize("hosts, bad", [
    ("127.0.0.1 localhost\n127.0.0.1\thead head.cluster\n", True), ("127.0.1.1 head.cluster head # the first\n", True),
    ("::1 head\n", True), ("10.0.0.1 head\n", False), ("127.0.0.1 head\n10.0.0.1 head\n", False),
    ("127.0.0.1 localhost # head\n", False), ("127.0.0.1 forehead\n", False), ("127.0.1.1 head node-b\n", False), ("\n", False),
])
def test_master_addr_that_the_hosts_file_gives_to_the_loopback(job, hosts, bad):
    for rank in (0, 3):
        env = slurm(rank, MASTER_ADDR="head", SLURMD_NODENAME="node-b", _hosts=hosts)
        assert "MASTER_ADDR=head is " in job.error(env) if bad else job.rank(env)["MASTER_ADDR"] == "head"


# ---------------------------------------------------------------------------------------------------- ports


def ports_of(pairs, range_="32768 60999", tmp_path=None):
    """MASTER_PORT of (job, step) pairs by the script's own function, with another ip_local_port_range."""
    text = (RUNSCRIPTS / "lib/master.bash").read_text()
    function = re.search(r"(?ms)^_port_of\(\) \{.*?^\}$", text).group(0)
    source = "/proc/sys/net/ipv4/ip_local_port_range"
    assert function.count(source) == 1
    (tmp_path / "range").write_text(range_ + "\n")
    program = function.replace(source, f"{tmp_path}/range") + (
        "\nset -u\nwhile read -r job step; do _port_of $job $step; echo $MASTER_PORT; done\n")
    done = subprocess.run(["bash", "-c", program], input="".join("%d %d\n" % pair for pair in pairs),
                          capture_output=True, text=True)
    assert done.stderr == ""
    return [int(port) for port in done.stdout.split()]


def test_ports_of_neighbours_differ_and_are_outside_the_ephemeral_range(tmp_path):
    ports = ports_of([(job, step) for job in range(9000000, 9000200) for step in range(16)], tmp_path=tmp_path)
    for first in range(0, 181):
        assert len(set(ports[first * 16:(first + 20) * 16])) == 320, "twenty jobs one after another"
    for low, high, first, last in ((32768, 60999, 10000, 32767), (15000, 65535, 10000, 14999),
                                   (1024, 60999, 61000, 65535), (9000, 65500, 1024, 8999), (1024, 65535, 10000, 29999)):
        ports = ports_of([(job, step) for job in range(1, 60) for step in (0, 5, 4294967290)], f"{low}\t{high}", tmp_path)
        assert first <= min(ports) and max(ports) <= last, (low, high)
    ports = ports_of([(job, 0) for job in range(512)], "1024 65023", tmp_path)
    assert len(set(ports)) == 512, "every port comes before one comes again"


def test_the_port_is_the_same_on_all_ranks_and_new_for_every_step_and_job(job):
    def port(env):
        return job.rank(env)["MASTER_PORT"]

    daemons = slurm(0, "1", "nid002", SLURM_JOB_NODELIST="nid[001-002]")
    for make in (slurm, lambda rank: ompi(rank, 4), lambda rank: pals(rank, 4, rank % 2, 2, PBS_NODEFILE="FILE"),
                 lambda rank: {**(daemons if rank > 1 else batch(nodes="nid[001-002]")), **ompi(rank, 4, rank % 2, 2)},
                 lambda rank: slurm(0, job=100 + rank, SLURM_HET_JOB_ID="100")):
        assert len({port(make(rank)) for rank in range(4)}) == 1
    starts = [slurm(), slurm(step=1), slurm(job=4712), ompi(0, 1), ompi(0, 1, PMIX_NAMESPACE="prterun-node1-77@1"),
              ompi(0, 1, PMIX_NAMESPACE="prterun-node1-78@1"), pals(0, 1, 0, 1),
              pals(0, 1, 0, 1, PALS_APID="another"), pals(0, 1, 0, 1, PBS_JOBID="1234568.desched1"),
              pals(0, 1, 0, 1, PBS_JOBID="1234567[3].desched1"), *[batch(SLURM_NTASKS=1)] * 2,
              *(pals(0, 1, 0, 1, MPI_LOCALRANKID=0, MPI_LOCALNRANKS=1, PALS_APID=apid) for apid in ("first", "second"))]
    assert len({port(env) for env in starts}) == len(starts)
    one = slurm(0, "1", "nid001")
    assert port({**one, "RANK": "0", "WORLD_SIZE": "1"}) == port(one)
    # PyTorch's own, where nothing has a number
    assert port(HAND) == port(hydra(0, 4, 0, 2, MASTER_ADDR="node1")) == "29500"
    assert port(hydra(0, 4, 0, 2, MASTER_ADDR="node1", PBS_JOBID="77.srv")) != "29500"


# ---------------------------------------------------------------------------------------------------- flight recorder

RECORDER = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT")
RECORDER_FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


def recorder(env):
    return tuple(env.get(name) for name in RECORDER), tuple(env.get(name) for name in RECORDER_FILES)


def test_flight_recorder_in_a_directory_of_others_goes_to_the_private_one(job):
    theirs, mine = job.dir / "theirs", {name: "/scratch/x" for name in CACHES}
    theirs.mkdir()
    if os.geteuid():
        theirs = "/"
    else:
        os.chown(theirs, 12345, 12345)
    private = job.rank(slurm(0), cwd=theirs)
    assert recorder(private)[1][0] == os.path.dirname(private["TRITON_CACHE_DIR"]) + "/flight-recorder-4711.0-rank-"
    assert recorder(job.rank({**slurm(0), **mine}, cwd=theirs)) == (("2000", "2000", "1", "1"), (None, None))
    assert "TORCH_FR_DUMP_TEMP_FILE" in job.rank({**slurm(0), **mine}, cwd=job.dir)


@pytest.mark.parametrize("version, old", [("2.7.1+rocm6.2", True), ("1.13.1", True), ("2.8.0", True), ("2.9.0", False), ("2.15.0", False)])
def test_flight_recorder_has_the_name_that_this_pytorch_reads(job, version, old):
    """Also where the environment that is active extends that of the module."""
    for place, more in (("module/", {"RUNSCRIPTS": f"{job.dir}/module/runscripts"}), ("", {})):
        (job.dir / f"{place}lib/python3.11/site-packages/torch-{version}.dist-info").mkdir(parents=True)
        sizes, _ = recorder(job.rank({**slurm(0), **more}, cwd=job.dir))
        assert sizes == ("2000", "2000" if old else None, "1", "1" if old else None)
    (job.dir / "activate").touch()
    env = job.rank({**slurm(0), "WITH_CONDA": f"source {job.dir}/activate"}, cwd=job.dir)
    assert recorder(env)[0] == ("2000", "2000", "1", "1"), "its Python is not known yet"


# ---------------------------------------------------------------------------------------------------- caches

def test_caches_are_private_per_job_and_node(job):
    first, second = job.rank(slurm(0)), job.rank(slurm(2))
    base = job.caches / f"slingtorch-{os.getuid()}"
    for name in CACHES:
        assert first[name].startswith(f"{base}/4711-nid001/") and second[name].startswith(f"{base}/4711-nid002/")
        assert os.path.isdir(first[name])
    for directory, _, _ in os.walk(str(base)):
        assert stat.S_IMODE(os.stat(directory).st_mode) == 0o700, directory
    base.chmod(0o750)
    assert job.rank(slurm(0, job=4712))["TRITON_CACHE_DIR"] != first["TRITON_CACHE_DIR"]
    assert ".._.._x-" in job.rank({"SLURM_JOB_ID": "../../x", "SLURM_NNODES": "1"})["TRITON_CACHE_DIR"]
    assert "cannot be created: free space there" in job.start({"PATH": job.bin}).stderr, "no mkdir"


def test_no_directory_is_made_for_caches_of_the_user(job):
    job.rank(dict.fromkeys(CACHES, "/scratch/mine"))
    assert not list(job.caches.iterdir())


def test_the_umask_stays_the_users(job):
    job.python("#!/bin/sh\numask\n")
    done = job.start(prefix=("bash", "-c", 'umask 027; exec "$0" "$@"'))
    assert done.stdout.strip() == "0027"


@pytest.mark.parametrize("prepare, words", [
    (lambda base, elsewhere: base.symlink_to(elsewhere), f"slingtorch-{os.getuid()}' is a symbolic link"),
    (lambda base, elsewhere: base.write_text(""), "is not a directory"),
    *((lambda base, elsewhere, mode=mode: (base.mkdir(), base.chmod(mode)), f"writable by others (mode {mode:o})")
      for mode in (0o770, 0o707, 0o777, 0o720)),
    (lambda base, elsewhere: (base.mkdir(0o700), (base / "4711-nid001").symlink_to(elsewhere)),
     "4711-nid001' is a symbolic link"),
    (lambda base, elsewhere: ((base / "4711-nid001").mkdir(0o700, parents=True), base.chmod(0o700),
                              (base / "4711-nid001/triton").symlink_to(elsewhere)), "triton' is a symbolic link"),
    *[(lambda base, elsewhere: (base.mkdir(0o777), os.chown(base, NOBODY, NOBODY)), "does not belong to you"),
      (lambda base, elsewhere: ((base / "4711-nid001").mkdir(0o700, parents=True), base.chmod(0o700),
                                os.chown(base / "4711-nid001", NOBODY, NOBODY)), "4711-nid001' does not belong to you")
      ] * (os.getuid() == 0),
])
def test_a_cache_directory_that_may_be_of_others_is_refused(job, prepare, words):
    elsewhere = job.dir / "elsewhere"
    elsewhere.mkdir()
    prepare(job.caches / f"slingtorch-{os.getuid()}", elsewhere)
    assert words in job.error(slurm(0)) and not list(elsewhere.iterdir())


def test_a_tmpdir_of_another_host_is_said_once_and_tmp_taken(job):
    env = {"SLINGTORCH_CACHE_ROOT": None, "TMPDIR": "/var/tmp/pbs.7.srv", "SLURM_JOB_ID": "tmpdir-test", "SLURM_NNODES": "1"}
    done = job.start({**slurm(0), **env})
    seen = json.loads(done.stdout)["env"]["TRITON_CACHE_DIR"]
    shutil.rmtree(os.path.dirname(seen))
    assert seen.startswith("/tmp/slingtorch-") and "TMPDIR=/var/tmp/pbs.7.srv does not exist on this node" in done.stderr
    done = job.start({**slurm(1), **env})
    shutil.rmtree(os.path.dirname(json.loads(done.stdout)["env"]["TRITON_CACHE_DIR"]))
    assert done.stderr == ""


@pytest.mark.skipif(os.getuid() != 0, reason="becoming another user, or mounting, needs root")
@pytest.mark.parametrize("env,named", [
    ({"TMPDIR": None}, "the default cache directory='/tmp'"),
    ({"TMPDIR": ""}, "the default cache directory='/tmp'"), ({"TMPDIR": "/tmp"}, "TMPDIR='/tmp'"),
    ({"TMPDIR": "/nowhere/at/all"}, "the default cache directory='/tmp'"),
    ({"SLINGTORCH_CACHE_ROOT": "/tmp"}, "SLINGTORCH_CACHE_ROOT='/tmp'"),
])
def test_only_a_variable_that_is_set_is_blamed(job, env, named):
    read_only = "mount --bind /tmp /tmp && mount -o remount,bind,ro /tmp && exec \"$@\""
    done = job.start({"SLINGTORCH_CACHE_ROOT": None, **slurm(1), **env},
                     prefix=("unshare", "--mount", "sh", "-c", read_only, "sh"))
    assert (done.returncode, done.stdout) == (1, "")
    assert f"conda-python-distributed: {named} cannot be written by user id" in done.stderr


def test_many_ranks_make_the_directory_at_once(job):
    started = [subprocess.Popen([str(RUNSCRIPTS / "conda-python-distributed"), "x"], env=job.environment(slurm(rank, "16")),
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE) for rank in range(16)]
    assert [(process.communicate()[1], process.returncode) for process in started] == [(b"", 0)] * 16


# ---------------------------------------------------------------------------------------------------- GPUs and network


@pytest.mark.parametrize("variable,env,expected", [
    ("CUDA_VISIBLE_DEVICES", {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, ["0", "1", "2", "3"]),
    ("CUDA_VISIBLE_DEVICES", {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b,GPU-c,GPU-d"}, ["GPU-a", "GPU-b", "GPU-c", "GPU-d"]),
    ("ROCR_VISIBLE_DEVICES", {"ROCR_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}, ["0,1", "2,3", "4,5", "6,7"]),
    ("ROCR_VISIBLE_DEVICES", {"SLURM_GPUS_ON_NODE": "8"}, ["0,1", "2,3", "4,5", "6,7"]),
    ("ROCR_VISIBLE_DEVICES", {"SLURM_GPUS_ON_NODE": "0"}, [None] * 4),
    ("ROCR_VISIBLE_DEVICES", {"HIP_VISIBLE_DEVICES": "4,5,6,7"}, ["4", "5", "6", "7"]),
    ("HIP_VISIBLE_DEVICES", {"ROCR_VISIBLE_DEVICES": "4,5,6,7"}, ["0", "1", "2", "3"]),
    ("ZE_AFFINITY_MASK", {"ZE_AFFINITY_MASK": "0.0,0.1,1.0,1.1"}, ["0.0", "0.1", "1.0", "1.1"]),
    ("GPU_DEVICE_ORDINAL", {"CUDA_VISIBLE_DEVICES": "3,2,1,0"}, ["3", "2", "1", "0"]),
    ("CUDA_VISIBLE_DEVICES", {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4"}, ["0", "1", "2", "3"]),
    ("CUDA_VISIBLE_DEVICES", {"CUDA_VISIBLE_DEVICES": "2"}, ["2"] * 4),  # limited already
    ("CUDA_VISIBLE_DEVICES", {"CUDA_VISIBLE_DEVICES": "0,1"}, ["0,1"] * 4),  # fewer than ranks
    ("CUDA_VISIBLE_DEVICES", {"CUDA_VISIBLE_DEVICES": ""}, [""] * 4),  # hidden by the user
    ("CUDA_VISIBLE_DEVICES", {"CUDA_VISIBLE_DEVICES": "0,1,-1,2,3,4,5"}, ["0,1,-1,2,3,4,5"] * 4),  # two are seen
    ("CUDA_VISIBLE_DEVICES", {"CUDA_VISIBLE_DEVICES": "NoDevFiles", "SLURM_GPUS_ON_NODE": "4"}, ["NoDevFiles"] * 4),
    ("CUDA_VISIBLE_DEVICES", {"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b,MIG-c,MIG-d"}, ["MIG-a", "MIG-b", "MIG-c", "MIG-d"]),
    ("CUDA_VISIBLE_DEVICES", {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "SLURM_GPUS_PER_TASK": "4"}, ["0,1,2,3"] * 4),
    # srun --gpus-per-task=4
    ("CUDA_VISIBLE_DEVICES", {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "SLURM_GPUS_ON_NODE": "16"}, ["0,1,2,3"] * 4),
    ("CUDA_VISIBLE_DEVICES",
     {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "SLURM_GPUS_ON_NODE": "4", "SLURM_GPUS_PER_TASK": "1"}, ["0", "1", "2", "3"]),
    ("CUDA_VISIBLE_DEVICES", {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "SLURM_TRES_PER_TASK": "gres/gpu:4"}, ["0,1,2,3"] * 4),
    ("CUDA_VISIBLE_DEVICES", {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "SLURM_TRES_PER_TASK": "cpu:7"}, ["0", "1", "2", "3"]),
    ("CUDA_VISIBLE_DEVICES", {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "SLURM_GPU_BIND": "closest"}, ["0,1,2,3"] * 4),
    ("CUDA_VISIBLE_DEVICES", {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "SLURM_GPU_BIND": "none"}, ["0", "1", "2", "3"]),
])
def test_gpu_shares(job, variable, env, expected):
    start = {"SLINGTORCH_GPU_VISIBILITY": variable, **env}
    assert [job.rank({**slurm(rank, "4"), **start}).get(variable) for rank in range(4)] == expected


UUIDS = "GPU-11111111-2222,GPU-33333333-4444"


def two_gpus(job):
    for number, uuid in enumerate(UUIDS.split(",")):
        (job.dir / f"gpus/0000:0{number}:00.0").mkdir(parents=True)
        (job.dir / f"gpus/0000:0{number}:00.0/information").write_text(f"Model: \t\t NVIDIA A100\nGPU UUID: \t {uuid}\n")
    return job.dir / "gpus"


def test_a_number_beyond_the_nodes_gpus_ends_the_list(job):
    env = {"CUDA_VISIBLE_DEVICES": "0,1,2", "_nvidia_gpus": two_gpus(job)}
    assert "this task sees only 2 GPU(s)" in job.error(**torchrun(job, "--torchrun=3", "a.py", env=env))


@pytest.mark.parametrize("listed, seen", [
    (UUIDS, UUIDS), ("GPU-33333333", "GPU-33333333"), ("0,1", "0,1"),
    ("GPU-aaaaaaaa-bbbb,GPU-cccccccc-dddd", None), ("0,GPU-cccccccc-dddd", None), ("GPU-11111111-2222,GPU-cccccccc-dddd", None),
])
def test_identifiers_of_another_nodes_gpus(job, listed, seen):
    """PBS exports those of the first node to all."""
    done = job.start({**slurm(0, "1(x2)"), "CUDA_VISIBLE_DEVICES": listed, "_nvidia_gpus": two_gpus(job)})
    assert json.loads(done.stdout)["env"].get("CUDA_VISIBLE_DEVICES") == seen
    assert ("but this node has no such GPU, so the variable is unset" in done.stderr) == (seen is None)
    assert job.rank({**slurm(1, "2"), "CUDA_VISIBLE_DEVICES": listed, "_nvidia_gpus": job.dir / "gpus"}).get("CUDA_VISIBLE_DEVICES") == seen


def test_facts_for_bash_are_made_from_those_of_python():
    assert (RUNSCRIPTS / "lib/facts.bash").read_text() == machine.for_bash()


def test_slingmpi_recognises_the_same_mpi():
    """A package of its own cannot import it."""
    pattern = machine.MPI_LIBRARY.pattern
    assert f"_MPI_LIBRARY = re.compile(r'{pattern[1:]}')" in (RUNSCRIPTS.parent / "slingmpi/slingmpi/__init__.py").read_text()


def test_network_plugin(job):
    """Without it, an error on several nodes before Python starts; one node does without."""
    plugin = job.dir / "plugin"
    (plugin / "ofi").mkdir(parents=True)
    for name in ("librccl-net.so", "ofi/libnccl-net-ofi.so"):   # NCCL opens the latter for NCCL_NET_PLUGIN=ofi alone
        (plugin / name).touch()
    needs = {"SLINGTORCH_MULTINODE_NCCL_NET": "AWS Libfabric"}
    for env in ({"NCCL_NET_PLUGIN": f"{plugin}/librccl-net.so"}, {"NCCL_NET_PLUGIN": "ofi"}, {"NCCL_NET": "Socket"},
                {"APPTAINER_CONTAINER": "/image.sif"}, {"LD_LIBRARY_PATH": f"/nowhere:{plugin}"}):
        job.rank({**slurm(1), **needs, **env})
    for env, message in [
        ({"LD_LIBRARY_PATH": f"/nowhere:{plugin}/ofi:"}, "needs NCCL's network plugin"),
        ({"NCCL_NET_PLUGIN": f"{plugin}/gone.so"}, f"NCCL_NET_PLUGIN='{plugin}/gone.so' does not exist or is not readable"),
    ]:
        assert message in job.error({**slurm(1), **needs, **env})
        job.rank({**slurm(1, "4"), **needs, **env})


FITS = "'eb PyTorch-2.10.0-cuda-12.8.eb' installs one for this driver"
NONE_FITS = "Use a PyTorch for an older CUDA"


@pytest.mark.parametrize("driver,cuda,machine,warned", [
    ("535.104.05", "12.9", "x86_64", None), ("535.104.05", "13.0", "x86_64", FITS), ("470.57.02", "12.9", "x86_64", NONE_FITS),
    # the wheel for CUDA 12 is for x86_64 alone
    ("535.104.05", "13.0", "aarch64", NONE_FITS), ("470.57.02", "11.8", "x86_64", None),
    ("535.104.05", "13.0", None, FITS if os.uname().machine == "x86_64" else NONE_FITS), ("580.65.06", "13.0", "aarch64", None), ("470.57.02", "14.0", "x86_64", None), ("470.57.02", None, "x86_64", None),
])
def test_driver_that_is_too_old_for_the_wheel(job, driver, cuda, machine, warned):
    version = f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {driver}  Wed Jul 14 19:13:55 UTC 2021\nGCC\n"
    env = {"_nvidia_driver": version, **({"_machine": machine} if machine else {}), "SLINGTORCH_CUDA_VERSION": cuda}
    done = job.start({**slurm(2), **env})
    assert done.returncode == 0
    assert ("this node's GPU driver is " + driver[:3] in done.stderr) is bool(warned)
    assert done.stderr.endswith(f"without NVIDIA's cuda-compat it finds no GPU. {warned}\n" if warned else "")
    assert job.start({**slurm(1), **env}).stderr == "", "once a node"


OFF = "is switched off, because it needs a job with disable_rdzv_get. "


@pytest.mark.parametrize("start, env, gets, says", [
    (slurm, {"SLURM_NETWORK": "disable_rdzv_get"}, None, ""),
    (slurm, {"SLURM_NETWORK": "single_node_vni,disable_rdzv_get"}, None, ""),
    (slurm, {}, 0, ""), (slurm, {}, "N", ""),   # sbatch --network of Slurm 22.05 and 24.11 is in no variable
    (slurm, {"SLURM_NETWORK": "single_node_vni"}, 0, ""),  # the whole system is so
    (lambda rank: slurm(rank, "4"), {}, 1, ""),  # on one node Slurm does not write the driver's file
    (slurm, {"FI_CXI_RX_MATCH_MODE": "software"}, 1, ""),  # HPE: needs no disable_rdzv_get
    (lambda _: TORCHRUN, {}, None, ""), (lambda _: TORCHRUN, {}, 0, ""),
    # steps of Slurm 22.05 and 24.11 have sbatch's --network without a variable that says so
    *((slurm, {"SLURM_NETWORK": network}, None, "It is unknown whether this is one. Put '#SBATCH --network=disable_rdzv_get'")
      for network in (None, "single_node_vni", "no_disable_rdzv_get")),
    (slurm, {"FI_CXI_RX_MATCH_MODE": "hybrid"}, 1, OFF + "Put '#SBATCH --network"),
    (slurm, {}, "Y", OFF + "Put '#SBATCH --network"),
    (slurm, {"SLURM_NETWORK": "single_node_vni"}, 1, OFF + "Put '#SBATCH --network"),
    (slurm, {"SLURM_NETWORK": "disable_rdzv_get"}, 1, OFF + "The job requested this, but"),
    (lambda rank: pals(rank, 4, rank, 2, MASTER_ADDR="deg0001"), {}, 1, OFF + "Start the ranks with 'mpiexec --disable-rdzv-get"),
])
def test_alt_read_stays_with_the_option_of_the_job(job, start, env, gets, says):
    """
    With it, or where nothing says what the job has; the first rank says what is unknown or switched off

    :param gets: what the driver says of the NIC's own gets; None: nothing
    """
    for number in range(2):
        path = job.dir / f"sys/cxi{number}/device/properties/rdzv_get_en"
        path.parent.mkdir(parents=True)
        if gets is not None:
            path.write_text(f"{gets}\n")
    for rank in (0, 1):
        done = job.start({**start(rank), **env, **ALT_READ, "_cxi_devices": job.dir / "sys"})
        seen = json.loads(done.stdout)["env"]
        assert {name: seen.get(name) for name in ALT_READ} == (dict.fromkeys(ALT_READ) if OFF in says else ALT_READ)
        assert seen.get("FI_CXI_RX_MATCH_MODE") == env.get("FI_CXI_RX_MATCH_MODE")
        assert done.stderr.count("\n") == bool(says and rank == 0) and (rank or says in done.stderr)


# ---------------------------------------------------------------------------------------------------------- torchrun


def torchrun(job, *args, env=(), cores="0-55", **more):
    """Start a task that stands for its node, with so many cores."""
    status = f"Name:\tbash\nCpus_allowed_list:\t{cores}\n"
    return {"args": args, "env": {**slurm(1, "1(x2)"), "_proc_status": status, **dict(env)}, **more}


@pytest.mark.parametrize("args,env,cores,message", [
    (("--torchrun", "a.py"), {"SLURM_GPUS_ON_NODE": "8"}, "1", "8 workers of this node would share 1 core(s)"),
    (("--torchrun=9", "a.py"), {"SLURM_GPUS_ON_NODE": "8"}, "0-55", "this task sees only 8 GPU(s)"),
    (("--torchrun=2", "a.py"), {"ZE_AFFINITY_MASK": "0", "SLURM_GPUS_ON_NODE": "2"}, "0-55", "task sees only 1 GPU(s)"),
    (("--torchrun=2", "a.py"), {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, "0-55", "hides all GPUs from this task"),
    (("--torchrun=2", "a.py"), {"CUDA_VISIBLE_DEVICES": "", "SLURM_GPUS_ON_NODE": "2"}, "0-55", "hides all GPUs"),
    (("--torchrun=2", "a.py"), {"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"}, "0-55", "this task sees only 1 GPU(s)"),
    (("--torchrun", "a.py"), {"SLURM_GPUS_ON_NODE": "0"}, "0-55", "gives no number of workers"),
    (("--torchrun=many", "a.py"), {}, "0-55", "--torchrun='many' gives no number of workers"),
    (("--torchrun", "a.py"), {**slurm(1, "4(x2)"), "SLURM_GPUS_ON_NODE": "8"}, "0-55", "this node already has 4 tasks"),
    (("--torchrun=2", "a.py"), {"PET_RDZV_BACKEND": "c10d"}, "0-55", "PET_RDZV_BACKEND=c10d is an option of torchrun"),
])
def test_torchrun_that_cannot_be_right(job, args, env, cores, message):
    assert message in job.error(**torchrun(job, *args, env=env, cores=cores))


@pytest.mark.parametrize("options", [
    ("--rdzv_endpoint", "nid001:29500"), ("--rdzv-endpoint=nid001:29500",), ("--rdzv_backend=c10d",), ("--standalone",),
    ("--max-restarts", "3", "--nnodes=2"), ("--nproc_per_node", "4"), ("--master_port=1",), ("--node_rank=0",),
    ("--rdzv_end=nid001",), ("--nproc-per", "2"), ("--no-python", "--standalone"), ("--nnode=2",), ("--stand",),
    ("--log-dir=/scratch/logs", "--nnodes=2"), ("--rdzv-endpoint=nid001:29500/x",), ("--log-dir=a.py", "--node-r=1"),
])
def test_torchrun_sets_the_rendezvous_by_itself(job, options):
    message = job.error(**torchrun(job, "--torchrun=2", *options, "train.py"), status=2)
    assert "is set from the scheduler. Leave it out" in message
    argv = json.loads(job.start(**torchrun(job, "--torchrun=2", "--max-restarts", "3", "train.py", *options)).stdout)["argv"]
    assert argv[-len(options):] == list(options), "the program's own"
    job.start(**torchrun(job, "--torchrun=2", "--no-python", "program", *options)).check_returncode()


def test_torchrun_outlives_the_signal_before_the_end(job):
    """Slurm's --signal reaches the agent and the workers."""
    job.python(f"#!{sys.executable}\nimport json, os, signal, sys\nos.kill(os.getpid(), signal.SIGUSR1)\n"
               "os.kill(os.getpid(), signal.SIGUSR2)\njson.dump({'env': {}, 'argv': sys.argv[1:]}, sys.stdout)\n")
    assert job.start(**torchrun(job, "--torchrun=2", "train.py")).returncode == 0
    assert job.start(slurm(1)).returncode == -signal.SIGUSR1


@pytest.mark.parametrize("allowed, more, threads", [
    ("0-127", {"SLURM_CPUS_ON_NODE": "128"}, "1"),
    ("0-63", {"SLURM_CPUS_ON_NODE": "64"}, "1"),            # of a node that others use, too
    ("0-63", {"SLURM_CPUS_ON_NODE": "128"}, None),           # bound
    ("8-15,72-79", {"SLURM_CPUS_ON_NODE": "128"}, None),
    ("0-127", {"_cores_online": "0-127\n"}, "1"),
    ("0-31", {"_cores_online": "0-127\n"}, None),
    ("0-127", {"SLURM_CPUS_ON_NODE": "128", "OMP_NUM_THREADS": "7"}, "7"),
])
def test_threads_of_ranks_that_nothing_binds(job, allowed, more, threads):
    more = {**torchrun(job, cores=allowed)["env"], **slurm(1), **more}
    assert job.rank(more).get("OMP_NUM_THREADS") == threads
    assert "OMP_NUM_THREADS" not in job.rank({**more, **slurm(0, "1"), "OMP_NUM_THREADS": None}), "one rank"


# ---------------------------------------------------------------------------------------------------- becoming python


def test_no_arguments(job):
    assert "no arguments" in job.error(status=2, args=())


def test_simple_is_python_alone(job):
    done = json.loads(job.start(slurm(1), script="conda-python-simple", args=()).stdout)
    sets = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", *CACHES}
    assert done["argv"] == [] and not sets & set(done["env"])


@pytest.mark.parametrize("script", NAMES[:2])
def test_no_python(job, script):
    (job.bin / "python").unlink()
    tools = job.dir / "tools"
    tools.mkdir()
    for tool in ("mkdir", "stat"):
        (tools / tool).symlink_to(shutil.which(tool))
    path = {"PATH": f"{job.bin}:{tools}"}
    assert "no 'python' in PATH=" in job.error(path, 127, script=script)
    job.python("#!/bin/sh\n", "python3")
    assert "PATH has 'python3' but no 'python'" in job.error(path, 127, script=script)


@pytest.mark.parametrize("script", NAMES[:2])
def test_status_signal_and_process_are_pythons(job, script):
    job.python("#!/bin/sh\nexit 3\n")
    assert job.start(script=script).returncode == 3
    job.python("#!/bin/sh\nkill -TERM $$\n")
    assert job.start(script=script).returncode == -signal.SIGTERM
    job.python("#!/bin/sh\necho $$\nexec sleep 30\n")
    process = subprocess.Popen([str(RUNSCRIPTS / script), "x"], env=job.environment(), stdout=subprocess.PIPE)
    assert int(process.stdout.readline()) == process.pid
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == -signal.SIGINT


@pytest.mark.parametrize("script", NAMES[:2])
def test_with_conda(job, tmp_path, script):
    activate = tmp_path / "activate"
    activate.write_text('export CONDA_ENV_ARGS="$#:$*"\ndeclare -x DECLARED=yes\n: "$never_set"\nfalse\n'
                        f'export PATH="{tmp_path}/envbin:$PATH"\ntrue\n')
    (tmp_path / "envbin").mkdir()
    (job.bin / "python").rename(tmp_path / "envbin" / "python")
    for how, args in ((f"source {activate} pytorch", "1:pytorch"), (f".  {activate}  a  * ", "2:a *"),
                      (f"source {activate}", "0:")):
        done = job.start({"WITH_CONDA": how}, script=script, args=("x", "y"))
        assert (done.returncode, done.stderr) == (0, "")
        seen = json.loads(done.stdout)
        assert (seen["env"]["CONDA_ENV_ARGS"], seen["env"]["DECLARED"], seen["argv"]) == (args, "yes", ["x", "y"])


@pytest.mark.parametrize("script", NAMES[:2])
def test_with_conda_is_data_and_not_a_program(job, tmp_path, script):
    flag = tmp_path / "flag"
    for how in (f"touch {flag}", f"$(touch {flag})", "source", "eval x", f"source;touch {flag}"):
        assert "WITH_CONDA=" in job.error({"WITH_CONDA": how}, script=script)
    assert "ended with status 7" in job.error({"WITH_CONDA": f"source {job.file('activate', 'return 7')}"}, script=script)
    said = job.start({"WITH_CONDA": f"source /nowhere;touch {flag}"}, script=script).stderr
    assert "/nowhere;touch: No such file or directory" in said and "ended with status 1" in said
    assert not flag.exists()


# ------------------------------------------------------------------------------------------ off the home directory


def test_home_directory_that_nodes_lack(job):
    work = job.dir / "work/z01/z01/somebody"
    work.mkdir(parents=True)
    env = {**slurm(), "HOME": f"{job.dir}/home/z01/z01/somebody", "SLINGTORCH_WORK_HOME": f"{job.dir}/home:{job.dir}/work"}
    assert job.rank({**env, "XDG_CACHE_HOME": "/mine"})["XDG_CACHE_HOME"] == "/mine"
    assert "XDG_CACHE_HOME" not in job.rank({**env, "HOME": "/root"})
    work.rmdir()
    done = job.start(env)
    assert done.returncode == 0 and "cannot be written on this node" in done.stderr and done.stderr.count("\n") == 1
    assert "XDG_CACHE_HOME" not in json.loads(done.stdout)["env"]


def test_hugging_face_off_the_home_directory(job):
    scratch = job.dir / "abc123/scratch/somebody"
    scratch.mkdir(parents=True)
    env = {**slurm(), "SLURM_JOB_ACCOUNT": "ABC123", "USER": "somebody", "HOME": str(job.dir / "home"),
           "SLINGTORCH_HF_HOME": f"{job.dir}/%a/scratch/%u/huggingface"}
    done = job.start(env)
    assert f"HF_HOME={scratch}/huggingface. The system deletes files there" in done.stderr and done.stderr.count("\n") == 1
    (scratch / "huggingface").mkdir()
    assert job.start(env).stderr == "" and job.start({**env, **slurm(1)}).stderr == ""
    assert job.rank({**env, "HF_HOME": "/mine"})["HF_HOME"] == "/mine"
    if os.geteuid() == 0:
        os.chown(str(scratch / "huggingface"), NOBODY, NOBODY)
        for mode, used in ((0o775, True), (0o777, False)):
            (scratch / "huggingface").chmod(mode)
            done = job.start(env)
            assert ("HF_HOME" in json.loads(done.stdout)["env"]) == used
            assert ("belongs to somebody else and everybody may write there" in done.stderr) != used
    scratch.rename(job.dir / "elsewhere")
    done = job.start(env)
    assert "scratch/somebody is not writable" in done.stderr and "HF_HOME" not in json.loads(done.stdout)["env"]
    for name in ("SLURM_JOB_ACCOUNT", "SLINGTORCH_HF_HOME"):
        assert "HF_HOME" not in job.rank({**env, name: None})


@pytest.mark.parametrize("library, env, words", [
    ("libtorch_cpu.so", {"SLURM_GPUS_ON_NODE": "4"}, "is a CPU build and cannot use them"),
    ("libtorch_cpu.so", {"SLURM_GPUS_ON_NODE": "0"}, None),
    ("libtorch_cpu.so", {"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": ""}, None),
    ("libtorch_hip.so", {"SLURM_GPUS_ON_NODE": "4"}, None),
    ("libtorch_cpu.so", {"EBROOTPYTORCH": "/apps/PyTorch/2.15.0"}, "instead of the module's (/apps/PyTorch/2.15.0)"),
    ("libtorch_cpu.so", {"EBROOTPYTORCH": "OWN"}, None),
    ("libtorch_cpu.so", {"EBROOTPYTORCH": "/apps/PyTorch/2.15.0", "APPTAINER_CONTAINER": "/apps/x.sif"}, None),
    (None, {"EBROOTPYTORCH": "/apps/PyTorch/2.15.0", "SLURM_GPUS_ON_NODE": "4"}, None),     # an environment on top
])
def test_pytorch_that_will_be_taken(job, library, env, words):
    """One of another environment than the module's, or one for processors in a job with GPUs, is not taken in silence."""
    if library:
        lib = job.dir / "lib/python3.11/site-packages/torch/lib"
        lib.mkdir(parents=True)
        for name in {library, "libtorch_cpu.so"}:
            (lib / name).touch()
    env = {**slurm(0), **{name: str(job.dir) if value == "OWN" else value for name, value in env.items()}}
    done = job.start(env)
    assert done.returncode == 0
    assert words in done.stderr and done.stderr.count("\n") == 1 if words else done.stderr == ""
    assert job.start({**env, "SLURM_PROCID": "1", "SLURM_LOCALID": "1"}).stderr == "", "rank 0 alone says it"


WHERE_IS_TORCH = "import importlib.util, os; print(os.path.realpath(importlib.util.find_spec('torch').origin))"


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A virtual environment with an empty torch."""
    path = tmp_path_factory.mktemp("torch") / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(path)], check=True)
    packages = next(path.glob("lib/python3*/site-packages"))
    (packages / "torch").mkdir()
    (packages / "torch/__init__.py").touch()
    return path


# each by one of the two scripts, which share the code
@pytest.mark.parametrize("script,files,args,env,where", [(NAMES[number % 2], *case) for number, case in enumerate([
    ([], ["../script/train.py"], {}, ""), (["script/torch.py"], ["../script/train.py"], {}, "the script's directory"),
    (["script/torch/__init__.py"], ["-u", "../script/train.py"], {}, "the script's directory"),
    (["script/torch.py"], ["-W", "ignore", "-Xutf8", "-uO", "../script/train.py"], {}, "the script's directory"),
    (["script/torch.py"], ["--check-hash-based-pycs", "never", "--", "../script/train.py"], {}, "the script's"),
    (["script/torch.py"], ["../script"], {}, "the program"),
    (["script/torch.py"], ["-P", "../script/train.py"], {}, ""),
    (["script/torch.py"], ["-uI", "../script/train.py"], {}, ""),
    (["script/torch.py"], ["../script/train.py"], {"PYTHONSAFEPATH": "1"}, ""),
    (["script/torch.py"], ["-E", "../script/train.py"], {"PYTHONSAFEPATH": "1"}, "the script's directory"),
    (["script/torch.py"], ["-c", WHERE_IS_TORCH], {}, ""), (["work/torch.py"], ["../script/train.py"], {}, ""),
    (["work/torch.py"], ["-c", WHERE_IS_TORCH], {}, "the working directory"),
    (["work/torch.py"], ["-uc", WHERE_IS_TORCH, "-P"], {}, "the working directory"),
    (["work/torch.py"], ["-Pc", WHERE_IS_TORCH], {}, ""),
    (["work/torch.py"], ["-m", "where"], {}, "the working directory"),
    (["work/torch.py"], ["-"], {}, "the working directory"),
    (["work/torch.py"], ["-"], {"PYTHONSAFEPATH": ""}, "the working directory"),
    (["other/torch.py"], ["../script/train.py"], {}, ""),
    (["other/torch.py"], ["../script/train.py"], {"PYTHONPATH": "../empty:../other"}, "PYTHONPATH"),
    (["other/torch.py"], ["-P", "../script/train.py"], {"PYTHONPATH": "../other"}, "PYTHONPATH"),
    (["other/torch.py"], ["-E", "../script/train.py"], {"PYTHONPATH": "../other"}, ""),
    (["other/torch.py"], ["-I", "../script/train.py"], {"PYTHONPATH": "../other"}, ""),
    (["work/torch.py"], ["../script/train.py"], {"PYTHONPATH": "../empty:"}, "PYTHONPATH"),
    (["other/deep/torch.py"], ["../script/train.py"], {"PYTHONPATH": "../o*r:../oth*/deep"}, ""),
    (["other/torch/notes.txt"], ["../script/train.py"], {"PYTHONPATH": "../other"}, ""),
    (["other/torch.py"], ["../script/train.py"], {"PYTHONPATH": "{packages}:../other"}, ""),
    (["script/torch.py"], ["../script/train.py"], {"PYTHONPATH": "{packages}"}, "the script's directory"),
    (["script/torch.py"], ["../script/train.py"], slurm(1, "2", "nid001"), None),
    (["other/torch.py"], ["../other/link.py"], {}, ""),     # it has the directory of its target
])])
def test_a_torch_that_is_not_the_environments_is_said(environment, tmp_path, script, files, args, env, where):
    """
    By the first rank alone, and as this real Python finds it

    :param where: what is said of its place; None: nothing, although it is another one
    """
    for name in ("caches", "script", "work", "other/deep", "empty"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("script/train.py", "script/__main__.py", "work/where.py"):
        (tmp_path / name).write_text(WHERE_IS_TORCH)
    (tmp_path / "other/link.py").symlink_to(tmp_path / "script/train.py")
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    packages = next(environment.glob("lib/python3*/site-packages"))
    env = {"PATH": f"{environment}/bin:/usr/bin:/bin", "SLINGTORCH_CACHE_ROOT": str(tmp_path / "caches"),
           **{name: value.format(packages=packages) for name, value in env.items()}}
    done = subprocess.run([str(RUNSCRIPTS / script), *args], env=env, cwd=str(tmp_path / "work"), text=True,
                          input=WHERE_IS_TORCH if args == ["-"] else "", capture_output=True)
    found = done.stdout.strip()
    assert done.returncode == 0 and found.startswith(str(environment)) == (where == ""), done.stderr
    if where:
        assert done.stderr.startswith(f"{script}: 'import torch' imports ") and done.stderr.count("\n") == 1
        assert os.path.realpath(done.stderr.split()[4]) == found and where in done.stderr
    else:
        assert done.stderr == ""


def test_a_torch_of_the_module_in_pythonpath_is_its_own(job, tmp_path):
    module = tmp_path / "software/PyTorch/2.4.0"
    (module / "lib/python3.11/site-packages/torch").mkdir(parents=True)
    (module / "lib/python3.11/site-packages/torch/__init__.py").touch()
    path = {"PYTHONPATH": str(module / "lib/python3.11/site-packages")}
    assert job.start({**path, "EBROOTPYTORCH": str(module)}).stderr == ""
    assert "PYTHONPATH" in job.start(path).stderr


# ---------------------------------------------------------------------------------------------------- cost


def processes(job, env, tmp_path):
    """Programs started besides the script itself and python, seen by strace."""
    strace = shutil.which("strace")
    assert strace, "strace is not installed: apt-get install strace"
    trace = tmp_path / "trace"
    job.python("#!/bin/sh\n")
    done = job.start(env, prefix=(strace, "-f", "-qq", "-e", "trace=clone,clone3,fork,vfork", "-o", str(trace)))
    assert (done.returncode, done.stderr) == (0, "")
    return len([line for line in trace.read_text().splitlines() if re.search(r"\b(clone|clone3|fork|vfork)\(", line)])


def test_processes_started(job, tmp_path):
    assert processes(job, slurm(0), tmp_path) == 2  # mkdir, stat
    assert processes(job, slurm(0), tmp_path) == 1  # stat
    assert processes(job, slurm(1), tmp_path) == 0
    table = tmp_path / "apinfo"
    table.write_bytes(apinfo(["deg0007", "deg0009"], 4))
    env = pals(4, 8, 0, 4, PALS_APINFO=str(table))
    assert processes(job, env, tmp_path) <= 3  # od, mkdir, stat
    assert processes(job, hydra(1, 4), tmp_path) == 1  # mkdir: the directory of another job


# --- the MPI that Python will use, and what started the ranks


def libraries(job, name, *files):
    """A directory with libraries of an MPI; in place of the system's, none are found."""
    for file in files:
        (job.dir / name / file).parent.mkdir(parents=True, exist_ok=True)
        (job.dir / name / file).touch()
    return str(job.dir / name)


def test_mpi_of_the_system_is_found(job):
    """SLINGTORCH_MPI=auto: the search path comes before the system; two in one place cannot be told apart."""
    system = libraries(job, "system", "libmpi.so.20")
    both = libraries(job, "both", "libmpi.so.40", "libmpich.so.12")
    host = libraries(job, "host", "libmpi_cray.so.12", "libmpi.so.12")
    auto = {**slurm(**PMIX), "SLINGTORCH_MPI": "auto", "_system_libraries": system}
    job.rank(auto)
    assert "the Cray MPICH of this Python does not" in job.error({**auto, "LD_LIBRARY_PATH": f"/none:{host}"})
    assert f"{both} has Open MPI and MPICH" in job.error({**auto, "_system_libraries": both})
    assert "no MPI was found" in job.error({**auto, "_system_libraries": "/none"})


def test_mpi_of_another_abi(job):
    """Cray MPICH of the host takes MPICH's place in a container, Open MPI's never."""
    host = libraries(job, "host", "libmpi_gnu_112.so.12", "libmpi.so.12")
    cray = slurm(PALS_RANKID=0, SLURM_MPI_TYPE="cray_shasta", LD_LIBRARY_PATH=host, APPTAINER_CONTAINER="/x.sif")
    job.rank({**cray, "SLINGTORCH_MPI": "mpich"})
    said = job.error({**cray, "SLINGTORCH_MPI": "openmpi"})
    assert "the Open MPI in the container does not understand srun --mpi=cray_shasta, which started the 4 ranks" in said
    assert f"Cray MPICH in {host} (LD_LIBRARY_PATH) cannot replace it: it has a different ABI" in said
    assert "export APPTAINERENV_SLINGTORCH_MPI= " in said
    # it is in no search path: the image's own does not understand
    assert "srun --mpi=pmi2" in job.error({**cray, "SLINGTORCH_MPI": "mpich", "LD_LIBRARY_PATH": ""})


def test_open_mpi_with_slurms_own_library(job):
    system = libraries(job, "system", "libmpi.so.40", "openmpi/mca_pmix_s2.so")
    job.rank(slurm(**PMI2, SLINGTORCH_MPI="openmpi", _system_libraries=system))
    env = hydra(0, 2, SLINGTORCH_MPI="openmpi", _system_libraries=system)
    assert "does not understand mpiexec of an MPICH, which started the 2 ranks and speaks PMI" in job.error(env)


def test_mpi4py_without_pmi_is_said(job):
    """Each rank would be rank 0 of 1 for MPI, and write the same files."""
    (job.dir / "own.py").write_text('"""mpi4py"""\nimport torch\nfrom mpi4py import MPI\n')
    (job.dir / "other.py").write_text("# import mpi4py\nimport torch\n")
    own, other = (("-u", str(job.dir / name)) for name in ("own.py", "other.py"))
    said = job.start(slurm(), args=own)
    assert said.returncode == 0 and said.stderr.count("\n") == 1
    assert "own.py imports mpi4py, but srun --mpi=none started the 4 ranks" in said.stderr
    for env, args in (slurm(1), own), (slurm(0, "1"), own), (slurm(**PMI2), own), (slurm(**PMIX), own), (slurm(), other):
        job.rank(env, args=args)


def test_one_word_about_the_mpi_for_each_node(job):
    done = job.start(slurm(rank=1, SLINGTORCH_MPI="openmpi"))
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


# ------------------------------------------------------------------------ several nodes, and nobody who starts the ranks


@pytest.mark.parametrize("env, starter, options", [
    *(({**SLURM_OF_TWO_NODES, "SLURM_JOB_NUM_NODES": "2"}, "srun", options) for options in ((), ("--torchrun=2",), ("--check",))),
    ({**SLURM_OF_TWO_NODES, "SLURM_NTASKS": "1", "SLURM_NNODES": "1", "SLURM_HET_SIZE": "2", "SLURM_NTASKS_HET_GROUP_1": "4"}, "srun", ()),
    *(({"PBS_JOBID": "12.server", **size}, "mpiexec", ()) for size in (
        {"PBS_NODEFILE": "FILE"}, {"PBS_NODEFILE": "/nonexistent"}, {"PBS_NODENUM": "1", "PBS_TASKNUM": "2"},
        {"PBS_NODENUM": "0", "PBS_TASKNUM": "00000146"}, {"PBS_NUM_NODES": "2"})),
    ({"LSB_JOBID": "7", "LSB_DJOB_HOSTFILE": "FILE"}, "mpirun", ()),
    ({"PE_HOSTFILE": "FILE", "NHOSTS": "2", "NSLOTS": "8"}, "mpirun", ()),
    ({"SGE_TASK_ID": "undefined", "JOB_ID": "3", "NHOSTS": "2", "NSLOTS": "8"}, "mpirun", ()),  # qrsh -inherit, a container
    ({"LOADL_STEP_ID": "ll.1.0", "LOADL_HOSTFILE": "FILE"}, "mpirun", ()),
    ({"HQ_NODE_FILE": "FILE", "HQ_NUM_NODES": "2"}, "mpirun", ()),
    ({"BATCH_HOSTS_FILE": "FILE", "BATCH_TASK_INDEX": "0"}, "mpirun", ()),
    ({"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"}, "torchrun", ()),
    ({"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1"}, "torchrun", ()),
    ({"PET_NNODES": "2", "PET_NODE_RANK": "1", "MASTER_ADDR": "job-0"}, "torchrun", ()),
    # a container that was given some variables alone
    ({"SLURM_JOB_ID": "4711"}, "srun", ()),
    ({"PBS_JOBID": "12.server"}, "mpiexec", ()),
    ({"OAR_JOB_ID": "9", "OAR_NODEFILE": "FILE"}, "mpirun", ()),
    ({"_CONDOR_NPROCS": "4", "_CONDOR_PROCNO": "2"}, "mpirun", ()),
    ({"AWS_BATCH_JOB_ID": "x", "AWS_BATCH_JOB_NUM_NODES": "2", "AWS_BATCH_JOB_NODE_INDEX": "1"}, "mpirun", ()),
    ({"FLUX_URI": "local:///run/flux/local"}, "flux run", ()),
], ids=lambda value: "-".join(value) if isinstance(value, dict) else "")
def test_several_nodes_without_a_launcher_are_an_error(job, env, starter, options):
    job.python("#!/bin/sh\n[ \"$*\" = 'getattr size' ] && echo 2\n", "flux")
    done = job.start(env, args=(*options, "train.py"))
    assert done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1, done.stderr
    assert starter in done.stderr and "RANK=0 WORLD_SIZE=1" in done.stderr
    assert identity(job.rank({**env, "RANK": "0", "WORLD_SIZE": "1"})) == (0, 1, 0, 1)
    assert identity(job.rank({**env, **ompi(0, 1)})) == (0, 1, 0, 1)


@pytest.mark.parametrize("env", [
    {**SLURM_OF_TWO_NODES, "SLURM_JOB_NUM_NODES": "1", "SLURM_NNODES": "1"},
    {"PBS_JOBID": "12.server", "PBS_NODEFILE": "FILE", "PBS_NODENUM": "0", "PBS_TASKNUM": "1", "PBS_NUM_NODES": "1"},
    {"LSB_JOBID": "7", "LSB_DJOB_HOSTFILE": "FILE"}, {"PE_HOSTFILE": "FILE", "NHOSTS": "1", "NSLOTS": "8"}, {"NHOSTS": "5"},
    {"NUM_NODES": "1", "SM_HOSTS": '["algo-1"]', "VC_WORKER_HOSTS": "a-0.a", "VC_WORKER_NUM": "01",
     "TF_CONFIG": '{"cluster":{"worker":["a:2222"]}}', "GPU_NUM_NODES_MAX": "2", "no_proxy": "a,b"},
    {"SGE_TASK_ID": "undefined", "NHOSTS": "1", "NSLOTS": "1"},
    {"SSH_CONNECTION": "10.0.0.1 40000 10.0.0.2 22", "SSH_TTY": "/dev/pts/1"},
    {"FLUX_URI": "local:///run/flux/local"},
], ids=lambda value: "-".join(value))
def test_one_node_without_a_launcher_is_one_rank(job, env):
    hosts = job.file("hosts", "a09n03\na09n03\n")
    job.python("#!/bin/sh\necho 1\n", "flux")
    env = {name: hosts if value == "FILE" else value for name, value in env.items()}
    assert identity(job.rank(env)) == (0, 1, 0, 1)


@pytest.mark.parametrize("launcher", [slurm(1), hydra(0, 2), ompi(0, 2), pals(0, 8, 0, 4)],
                         ids=["slurm", "hydra", "ompi", "pals"])
def test_ranks_that_have_lost_their_variables(job, launcher):
    """A container with --cleanenv, env -i: each of them was rank 0 of 1."""
    clean = 'env -i PATH="$PATH" SLINGTORCH_CACHE_ROOT="$SLINGTORCH_CACHE_ROOT" $more "$0" "$@"; exit $?'
    prefix = ("bash", "-c", clean)
    assert "this is one of several ranks" in job.error(launcher, prefix=prefix)
    assert identity(job.rank({**launcher, "more": "RANK=0 WORLD_SIZE=1"}, prefix=prefix)) == (0, 1, 0, 1)
    assert identity(job.rank(slurm(0, "1"), prefix=prefix)) == (0, 1, 0, 1), "the only rank"


STEP = "0::/system.slice/slurmstepd.scope/job_4711/step_"


@pytest.mark.parametrize("env, cgroup, by", [
    ({"SSH_CONNECTION": "10.0.0.1 40000 10.0.0.2 22"}, "0::/user.slice", "ssh (pdsh, clush) started this process"),
    ({"JOB_COMPLETION_INDEX": "3"}, "0::/", "this is pod 3 of an indexed Job of Kubernetes"),
    # variables of several nodes that the list of sizes does not name
    *(({entry.partition("=")[0]: entry.partition("=")[2]}, "0::/", f"{entry[:80]} is a variable of a job of several nodes")
      for entry in ("AZ_BATCH_HOST_LIST=10.0.0.4,10.0.0.5", "AZ_BATCH_NODE_LIST=10.0.0.4;10.0.0.5",
                    'SM_HOSTS=["algo-1","algo-2"]', "VC_WORKER_HOSTS=a-0.a,a-1.a", "VC_WORKER_NUM=2", "MA_NUM_HOSTS=16",
                    "NGC_ARRAY_SIZE=2", "BEAKER_REPLICA_COUNT=2", "DSTACK_NODES_NUM=10", "NUM_NODES=2",
                    "K_MPI_JOB_ROLE=launcher",
                    'TF_CONFIG={"cluster":{"worker":["a:2222","b:2222"]},"task":{"type":"worker","index":0}}',
                    'CLUSTER_SPEC={"cluster":{"workerpool0":["a-0:2222"],"workerpool1":["a-1:2222"]}}')),
    ({}, STEP + "0/user/task_0", "job_4711/step_0/user/task_0, but that job's variables are not set"),
    ({}, STEP + "extern/user/task_1", "job_4711/step_extern/user/task_1, but"),
    ({}, "4:cpuset:/\n3:memory:/slurm/uid_7/job_4711/step_batch/task_0", "slurm/uid_7/job_4711/step_batch/task_0, but"),
    ({}, "9:memory:/pbs_jobs.service/jobid/12.server", "pbs_jobs.service/jobid/12.server, but"),
], ids=str)
def test_one_rank_that_may_be_one_of_several_is_said(job, env, cgroup, by):
    env = {**env, "_proc_cgroup": cgroup + "\n"}
    done = job.start(env)
    assert done.returncode == 0 and done.stderr.count("\n") == 1, done.stderr
    assert "this rank starts alone: " in done.stderr and by in done.stderr
    job.rank({**env, "SLURM_JOB_ID": "4711", "SLURM_NNODES": "1"})
    job.rank({**env, "RANK": "0", "WORLD_SIZE": "1"})


def test_the_only_task_of_a_step_in_a_job_of_several_nodes(job):
    """A shell or a notebook that is such a step says so; what srun itself starts as one task is meant."""
    env = slurm(0, "1", SLURM_JOB_NUM_NODES=10)
    done = job.start({**env, "SLURM_TASK_PID": "1"})
    assert done.returncode == 0 and done.stderr.count("\n") == 1, done.stderr
    assert "one rank in a job of 10 nodes" in done.stderr and "srun --overlap" in done.stderr
    for quiet in ({**env, "SLURM_JOB_NUM_NODES": "1", "SLURM_TASK_PID": "1"}, env, slurm(0, SLURM_TASK_PID=1),
                  {**env, "SLURM_TASK_PID": "1", "RANK": "0", "WORLD_SIZE": "1"}):
        assert job.start(quiet).stderr == ""
    direct = ("bash", "-c", 'SLURM_TASK_PID=$$ exec "$0" "$@"')
    assert job.start(env, prefix=direct).stderr == ""


# ------------------------------------------------------------------------------------------- what others put into numbers

EVIL = "low[$(touch {never})0]"


@pytest.mark.parametrize("names", [
    ("SLURM_STEP_ID", "SLURM_STEPID"), ("SLURM_JOB_ID", "SLURM_JOBID"), ("SLURM_PROCID",), ("SLURM_LOCALID",),
    ("SLURM_NODEID",), ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), ("SLURM_STEP_TASKS_PER_NODE",), ("MASTER_PORT",),
    ("SLURM_GPUS_ON_NODE",), ("SLURM_RESTART_COUNT",), ("SLINGTORCH_STAGE_NODES",), ("SLINGTORCH_STAGE_TIMEOUT",),
    ("LOCAL_RANK",),
], ids=lambda names: names[0])
def test_numbers_are_no_programs(job, names):
    """bash evaluates what is in a variable that it calculates with, and runs commands in a subscript."""
    never = job.dir / "never"
    more = {"SLINGTORCH_GPU_VISIBILITY": "CUDA_VISIBLE_DEVICES", "SLINGTORCH_STAGE_NODES": "1"}
    job.start({**slurm(1), **more, **dict.fromkeys(names, EVIL.format(never=never))})
    for launcher in (hydra(1, 2), ompi(1, 2), pals(1, 8, 1, 4)):
        job.start({**launcher, **more, **dict.fromkeys(names, EVIL.format(never=never))})
    assert not never.exists()


def test_no_here_strings():
    """bash writes them to a file in TMPDIR, and goes on without it where the disk is full."""
    for path in RUNSCRIPTS.rglob("*"):
        if path.is_file() and path.suffix in ("", ".bash"):
            code = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
            assert not [line for line in code if "<<<" in line and "'# <<<" not in line], path


# --------------------------------------------------------------------------- what an environment can bring


@pytest.mark.parametrize("script", ["conda-python-distributed", "conda-python-simple"])
def test_functions_that_the_environment_brings_are_not_called(job, script):
    """A shell may export functions with the names of builtins and programs, and options, and a file to read first."""
    names = ("exec", "source", "printf", "read", "cd", "hash", "type", "unset", "builtin", "python", "mkdir", "stat")
    (job.dir / "first").write_text("echo first; exit 3\n")
    env = {**slurm(1), **{f"BASH_FUNC_{name}%%": "() { echo called; }" for name in names},
           "BASH_ENV": job.dir / "first", "SHELLOPTS": "noexec"}
    done = job.start(env, script=script)
    assert (done.returncode, done.stderr) == (0, "") and json.loads(done.stdout)["argv"] == ["train.py"]


def test_a_file_of_with_conda_may_call_module(job):
    """As on machines whose shells have the function of their modules tool, which scripts inherit or BASH_ENV defines."""
    (job.dir / "tool/init").mkdir(parents=True)
    (job.dir / "tool/init/bash").write_text("module() { export LOADED=$2; }\n")
    (job.dir / "activate").write_text("module load python\n")
    env = job.rank({"WITH_CONDA": f"source {job.dir}/activate", "MODULESHOME": job.dir / "tool"}, script="conda-python-simple")
    assert env["LOADED"] == "python"


def test_a_rank_waits_as_long_as_the_node_is_cleaned_up(tmp_path):
    """However long that takes: of a large environment more than the hundred looks at a watcher that is gone."""
    node = tmp_path / 'node'
    (node / 'ranks').mkdir(parents=True)
    done = subprocess.run(['bash', '-c', """
        . "$1"
        sleep 60 & watcher=$! looks=0 _node_dir=$2
        : > "$2/watcher-$watcher"
        exec {_watch_pipe}> /dev/null
        _pause() { ((++looks != 150)) || { kill $watcher; rm -r "$_node_dir"; }; }
        _run_as_child sh -c 'exit 3'""", 'bash', str(RUNSCRIPTS / 'lib/stage.bash'), str(node)], timeout=60)
    assert done.returncode == 3 and not node.exists()


def of_stage(directory, program, **env):
    """What these lines print as a rank of the node, with functions of stage.bash and a clock that goes a minute at each look."""
    (directory / "node/ranks").mkdir(parents=True, exist_ok=True)
    head = """set -u
        . "$1/lib/stage.bash"
        _node_dir=$2/node node=n1 shared=/shared local_rank=1 staged='' clock=0
        _say() { printf '%s\\n' "$*"; }
        _now() { now=$((++clock * 60)); }
        _pause() { :; }
        _wait() { _wait_for_stage; echo "$clock, $staged"; }
        """
    done = subprocess.run(["bash", "-c", head + program, "bash", str(RUNSCRIPTS), str(directory)], text=True, timeout=60,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={"PATH": f"{directory}:/usr/bin:/bin", **env})
    return done.stdout.replace(str(directory), "DIR")


ENDED = "node n1: not staged: the first rank of this node ended before staging was done. The other ranks use the shared copy /shared\n"
MUTE = ("node n1: not staged: no answer from the first rank of this node within 1200 s (SLINGTORCH_STAGE_TIMEOUT=600). The others "
        "use the shared copy /shared\n")


@pytest.mark.parametrize("program, said", [
    (': > "$_node_dir/result-$$-env"; _wait; cd "$_node_dir"; [[ -e ranks/$$ ]] && echo noted', "2, DIR/node/env\nnoted\n"),
    (': > "$_node_dir/result-9999999-shared"; _wait', "2, \n"), (': > "$_node_dir/result-9999999-env"; _wait', MUTE + "22, \n"),
    ("local_rank=2; _wait", "22, \n"), ('_pause() { rm -r "$_node_dir"; }; _wait', ENDED + "3, \n"),
    ('_pause() { rm -r "$_node_dir"; }; local_rank=2; _wait', "3, \n"), ("_node_dir=$2/none; _wait", "3, \n"),
    ("_node_dir=$2/gone/base/none; _wait", "2, \n"), ("_node_dir=$2/link; ln -s node $2/link; _wait", "3, \n"),
])
def test_the_other_ranks_of_a_node_wait_for_its_image(tmp_path, program, said):
    assert of_stage(tmp_path, program) == said


def test_the_checksum_of_an_image_with_openssl_and_without(tmp_path):
    (tmp_path / "image").write_text("x")
    said = of_stage(tmp_path, 'f() { read -r sum _ < <(_sha256 "$2"); echo $sum; }; f "$@/image"; openssl() { return 1; }; f "$@/image"')
    assert said == f"{hashlib.sha256(b'x').hexdigest()}\n" * 2


OPTIONS = "-o attr_timeout=86400,entry_timeout=86400,negative_timeout=86400,kernel_cache "


@pytest.mark.parametrize("programs, said", [
    ({"squashfuse_ll": "env"}, "squashfuse_ll DIR/node/image DIR/node/env\n0, env ranks\n"),
    ({"squashfuse_ll": "false", "squashfuse": "env"}, f"squashfuse_ll DIR/node/image DIR/node/env\nsquashfuse {OPTIONS}DIR/node/image "
     "DIR/node/env\n0, env ranks\n"),
    ({"squashfuse_ll": "false", "unsquashfs": "env"}, "squashfuse_ll DIR/node/image DIR/node/env\nnode n1: cannot mount the image "
     "(squashfuse_ll: no permission): unpacking it\nunsquashfs -q -n -no-xattrs -d DIR/node/env DIR/node/image\n0, env ranks\n"),
    ({"squashfuse_ll": "wrong"}, "squashfuse_ll DIR/node/image DIR/node/env\nnode n1: not staged: its Python does not start from DIR/node "
     "(mounted noexec?): no library. This node uses the shared copy /shared: the same packages, slower to start\n1, env ranks shared\n"),
    ({"squashfuse_ll": "other", "unsquashfs": "env"}, "squashfuse_ll DIR/node/image DIR/node/env\nnode n1: cannot mount the image (no squashfuse): "
     "unpacking it\nnode n1: not staged: the image has no bin/python: it is not an environment. Install the module again (eb --rebuild). "
     "This node uses the shared copy /shared: the same packages, slower to start\n1, env ranks shared\n"),
    ({}, "node n1: not staged: the image can be neither mounted (no squashfuse) nor unpacked (no unsquashfs). Have squashfuse or "
     "squashfs-tools installed on the nodes. This node uses the shared copy /shared: the same packages, slower to start\n1, env ranks "
     "shared\n"),
    ({"unsquashfs": "false"}, "node n1: cannot mount the image (no squashfuse): unpacking it\nunsquashfs -q -n -no-xattrs -d DIR/node/env "
     "DIR/node/image\nnode n1: not staged: unsquashfs failed (its message is above). This node uses the shared copy /shared: the same "
     "packages, slower to start\n1, ranks shared\n"),
])
def test_how_an_image_is_opened(tmp_path, programs, said):
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        testbed.missing("/dev/fuse")
    for name, does in programs.items():
        python = {"env": "exit", "wrong": "echo no library; exit 1"}.get(does)
        make = f"mkdir -p $env/bin; printf '#!/bin/sh\\n{python}\\n' > $env/bin/python; chmod 755 $env/bin/python" if python else (
            "echo no permission; exit 1" if does == "false" else "touch $env/x")
        (tmp_path / name).write_text(f'#!/bin/bash\necho "${{0##*/}} $*" >> {tmp_path}/calls\nenv={tmp_path}/node/env\n{make}\n')
        (tmp_path / name).chmod(0o755)
    found = of_stage(tmp_path, """
        mkdir "$_node_dir/env"; : > "$_node_dir/image"
        type() { [[ -x $dir/$2 ]]; }
        dir=$2; _say() { printf '%s\\n' "$*" >> "$dir/calls"; }
        _open_image; status=$?
        cat "$dir/calls"; cd "$_node_dir"; set -- *; set -- "${@/result-*-/}"; echo "$status, $*" """)
    assert found == said


def test_the_watcher_of_a_node_outlives_signals_and_removes_all(tmp_path):
    """It waits until the first rank has ended, whose pipe it reads."""
    (tmp_path / "node/ranks").mkdir(parents=True)
    for name in ("node/result-1-env", "sent", "sent.ok", "sent.failed"):
        (tmp_path / name).touch()
    watcher = subprocess.Popen(["bash", RUNSCRIPTS / "lib/stage.bash", tmp_path / "node", "1", tmp_path / "sent"], stdin=subprocess.PIPE)
    while not (tmp_path / f"node/watcher-{watcher.pid}").exists():
        assert watcher.poll() is None
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        watcher.send_signal(number)
    rank = subprocess.Popen(["sleep", "60"])
    (tmp_path / f"node/ranks/{rank.pid}").touch()
    watcher.stdin.close()
    with pytest.raises(subprocess.TimeoutExpired):
        watcher.wait(0.5)
    rank.kill()
    rank.wait()
    assert watcher.wait(60) == 0 and list(tmp_path.iterdir()) == []
